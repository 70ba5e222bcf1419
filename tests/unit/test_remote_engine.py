"""An engine behind a server is the engine itself; what goes wrong on the way has a name, and nothing waits for ever."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capo_megatron.config import SeparateConfig
from capo_megatron.errors import ConfigError, RolloutError
from capo_megatron.rollout import channel, server, transfer
from capo_megatron.rollout.channel import SECRET, Desk, Line, secret, split_address
from capo_megatron.rollout.remote import RemoteEngine
from capo_megatron.rollout.server import EngineServer
from capo_megatron.rollout.sketch import differing
from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.seams import RolloutEngine, SamplingParams, Solo, Team
from tests.unit.tiny_qwen2 import (
    NumberTokenizer,
    ThreadTeam,
    engine_of,
    mixed_problems,
    on_ranks,
    tiny_config,
    tiny_model,
    weights_of,
)

TOKEN = "a secret of the tests"
IDENTITY = {"model": {"layers": 2}, "dtype": "float32"}
PARAMS = SamplingParams(6, temperature=0.8, stop_ids=(3,), seed=4)
PAIRS = [((1, 2), (3, 4, 5)), ((6,), (7, 8))]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, TOKEN)
    monkeypatch.setattr(server, "_IDLE_S", 0.05)
    monkeypatch.setattr(channel, "_AGAIN_S", 0.05)


def empty_engine(share: tuple[int, int] = (0, 1)) -> TransformersEngine:
    return TransformersEngine(tiny_config(), NumberTokenizer(), torch.float32, 64, share)


@contextmanager
def served(*engines: RolloutEngine, identity: dict[str, Any] = IDENTITY) -> Iterator[str]:
    """The address of a server with these engines, each on a rank of its own."""
    desk, ended = Desk("127.0.0.1:0", TOKEN.encode()), threading.Event()
    desk_of = {0: desk}

    def work(team: Team) -> None:
        EngineServer(engines[team.rank], team, CPU, identity, 1e-3, 1e-5).serve(desk_of.get(team.rank), ended.is_set)

    alone = threading.Thread(target=lambda: on_ranks(len(engines), work), daemon=True)
    alone.start()
    try:
        yield f"127.0.0.1:{desk.port}"
    finally:
        ended.set()
        alone.join(timeout=10)
        desk.close()
        assert not alone.is_alive()


def options(*servers: str, **changes: Any) -> SeparateConfig:
    return SeparateConfig(servers=servers, **{"wait_s": 5.0, "silence_s": 5.0, "limit_s": 20.0} | changes)


def remote(
    *servers: str, team: Team | None = None, identity: dict[str, Any] = IDENTITY, **changes: Any
) -> RemoteEngine:
    return RemoteEngine(
        options(*servers, **changes), identity, NumberTokenizer(), team or Solo(), bucket_bytes=4096, device=CPU
    )


# --- the engine -------------------------------------------------------------------------------------------------------


def test_what_it_says_is_what_the_engine_says_after_every_refit() -> None:
    problems = mixed_problems(5)
    with served(empty_engine()) as address:
        ours = remote(address)
        assert (ours.version, ours.share) == (-1, (0, 1))
        for version in (0, 1, 5):
            model = tiny_model(version)
            local = engine_of(model, version=version)
            ours.load_weights(weights_of(model), version)
            assert ours.version == version
            assert ours.generate(problems, 3, PARAMS) == local.generate(problems, 3, PARAMS)
            assert ours.logprobs(PAIRS, 0.8) == local.logprobs(PAIRS, 0.8)
            assert ours.sketches() == local.sketches()
            assert ours.decode([4, 5]) == "4 5"
            ours.forget()
            ours.sleep()
            ours.wake()
        assert ours.generate([], 3, PARAMS) == []
        assert ours.logprobs([], 1.0) == []


def test_what_the_engine_refuses_is_refused_and_the_next_call_is_answered() -> None:
    weights = weights_of(tiny_model())
    with served(empty_engine()) as address:
        ours = remote(address)
        with pytest.raises(RolloutError, match=rf"engine server {address}: .*without weights"):
            ours.generate(mixed_problems(1), 1, PARAMS)
        with pytest.raises(RolloutError, match=f"1 missing: {weights[3][0]}"):
            ours.load_weights(weights[:3] + weights[4:], 1)
        assert ours.version == -1
        ours.load_weights(weights, 2)
        with pytest.raises(RolloutError, match="positions, the model has 256"):
            ours.generate(mixed_problems(1), 1, SamplingParams(300))
        assert ours.version == 2
        assert len(ours.generate(mixed_problems(1), 1, PARAMS)[0]) == 1


def test_trainer_ranks_that_share_a_server_make_it_work_once() -> None:
    engine, asked = empty_engine(), []
    generate = engine.generate
    engine.generate = lambda *given: asked.append(1) or generate(*given)  # type: ignore[method-assign, func-returns-value]
    model, problems = tiny_model(), mixed_problems(4)
    with served(engine) as address:

        def work(team: ThreadTeam) -> Any:
            ours = remote(address, team=team)
            read = iter(weights_of(model))
            ours.load_weights(read, 3)
            assert next(read, None) is None, "producing weights is collective: all ranks go to the end"
            team.barrier()
            return ours.share, ours.version, ours.generate(problems, 2, PARAMS), ours.generate(problems[:1], 1, PARAMS)

        one, two = on_ranks(2, work)
    assert one == two
    assert one[:2] == ((0, 1), 3)
    assert len(asked) == 2


def test_ranks_are_dealt_out_to_servers_and_servers_to_their_ranks() -> None:
    model, problems = tiny_model(), mixed_problems(5)
    wanted = engine_of(model).generate(problems, 2, PARAMS)
    with ExitStack() as stack:
        first = stack.enter_context(served(empty_engine((0, 2)), empty_engine((1, 2))))
        second = stack.enter_context(served(empty_engine()))

        def work(team: ThreadTeam) -> Any:
            ours = remote(first, second, team=team)
            ours.load_weights(weights_of(model), 0)
            assert not differing(engine_of(model).sketches(), ours.sketches(), 1e-6)
            return ours.share, ours.generate(problems, 2, PARAMS), ours.logprobs(PAIRS, 1.0)

        found = on_ranks(4, work)
    assert [share for share, _, _ in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for _, groups, logprobs in found:
        assert [[sample.ids for sample in group] for group in groups] == [[s.ids for s in group] for group in wanted]
        assert logprobs == engine_of(model).logprobs(PAIRS, 1.0)


def test_engines_of_one_server_that_differ_are_found() -> None:
    one, two = engine_of(tiny_model(0), share=(0, 2)), engine_of(tiny_model(1), share=(1, 2))
    with served(one, two) as address:
        ours = remote(address)
        with pytest.raises(RolloutError, match="its engines do not agree: on rank 1 probabilities"):
            ours.logprobs(PAIRS, 1.0)
        with pytest.raises(
            RolloutError, match=r"its ranks 0 and 1 hold different weights: model\.embed_tokens\.weight"
        ):
            ours.sketches()


def test_a_server_goes_on_to_the_next_run_and_the_one_before_hears_of_it() -> None:
    with served(empty_engine()) as address:
        before, after = remote(address), None
        before.load_weights(weights_of(tiny_model()), 7)
        after = remote(address)
        assert after.version == -1, "weights of another run are none of this one's"
        after.load_weights(weights_of(tiny_model(1)), 0)
        for action in (lambda: before.version, before.forget, lambda: before.load_weights(weights_of(tiny_model()), 8)):
            with pytest.raises(RolloutError, match="serves another run now"):
                action()
        assert after.version == 0


def test_a_server_of_another_model_is_refused() -> None:
    with (
        served(empty_engine(), identity=IDENTITY | {"dtype": "bfloat16"}) as address,
        pytest.raises(ConfigError, match="it was started with dtype bfloat16, the trainer has float32"),
    ):
        remote(address)


def test_ranks_that_cannot_be_dealt_out_are_refused() -> None:
    outcome = on_ranks(3, lambda team: remote("a:1", "b:2", team=team))
    assert all(isinstance(found, ConfigError) and "3 trainer ranks" in str(found) for found in outcome)


# --- weights on the way -----------------------------------------------------------------------------------------------


def groups(patience_s: float = 5.0) -> tuple[transfer.Group, transfer.Group]:
    store = transfer.host_store(patience_s)
    made: dict[int, transfer.Group] = {}

    def make(rank: int) -> None:
        here = store if rank == 0 else transfer.reach_store("127.0.0.1", store.port, patience_s)
        made[rank] = transfer.Group(here, rank, 2, "gloo", CPU, patience_s)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1]


def both(send: Callable[[], None], receive: Callable[[], Any]) -> Any:
    """What `receive` returns while `send` runs."""
    thread = threading.Thread(target=send)
    thread.start()
    found = receive()
    thread.join()
    return found


def test_tensors_arrive_bit_for_bit_in_buckets_that_are_not_larger_than_asked() -> None:
    sender, receiver = groups()
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (50, 7), (1,), (40, 40), (5, 5), (2, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    weights = [(f"w{i}", torch.randn(shape, generator=generator).to(dtypes[i % 3])) for i, shape in enumerate(shapes)]
    weights.append(("transposed", torch.randn(4, 6, generator=generator).t()))
    sizes: list[int] = []
    plain = receiver.broadcast
    receiver.broadcast = lambda tensor: sizes.append(tensor.nbytes) or plain(tensor)  # type: ignore[assignment, func-returns-value, method-assign]
    found = both(lambda: transfer.send(sender, weights, 1000), lambda: list(transfer.Received(receiver)))
    assert [name for name, _ in found] == [name for name, _ in weights]
    for (_, got), (_, sent) in zip(found, weights, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent)
    larger = sorted(size for size in sizes if size > 1000)
    assert larger == [40 * 40 * 4], "one tensor is larger than a bucket, and travels alone"


def test_a_bucket_that_is_lost_leaves_no_usable_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transfer._send_bucket

    def lossy(group: Any, number: int, *rest: Any) -> None:
        if number != 2:
            plain(group, number, *rest)

    with served(empty_engine()) as address:
        ours = remote(address)
        ours.load_weights(weights_of(tiny_model()), 0)
        monkeypatch.setattr(transfer, "_send_bucket", lossy)
        with pytest.raises(RolloutError, match=r"bucket 2 was lost; bucket 3 came in its place\. .* missing"):
            ours.load_weights(weights_of(tiny_model(1)), 1)
        assert ours.version == -1
        with pytest.raises(RolloutError, match="without weights"):
            ours.generate(mixed_problems(1), 1, PARAMS)
        monkeypatch.setattr(transfer, "_send_bucket", plain)
        after = remote(address)  # the next start of the run
        after.load_weights(weights_of(tiny_model(1)), 1)
        assert after.version == 1


def test_a_sender_that_stops_is_given_up_in_time() -> None:
    sender, receiver = groups(patience_s=1.0)
    received = transfer.Received(receiver)
    began = time.monotonic()
    found = both(
        lambda: transfer._send_bucket(sender, 1, [], torch.zeros(16, dtype=torch.uint8), transfer.never),
        lambda: list(received),
    )
    assert found == []
    assert "weights: a broadcast" in received.fault
    assert time.monotonic() - began < 5


def test_a_sender_learns_at_once_that_the_other_side_has_ended() -> None:
    sender, receiver = groups(patience_s=30.0)
    receiver.close()
    began = time.monotonic()
    with pytest.raises(RolloutError, match="weights: a broadcast"):
        transfer.send(sender, weights_of(tiny_model()), 4096, over=lambda: True)
    assert time.monotonic() - began < 5


def test_a_sender_whose_last_bucket_has_come_is_not_told_that_the_other_side_has_given_up() -> None:
    """The other side may be done, and say so, before the sender looks again."""
    arrived = threading.Event()

    class Work:
        is_completed = staticmethod(arrived.is_set)

        def wait(self) -> None:
            assert arrived.is_set()

    group = transfer.Group.__new__(transfer.Group)
    group._patience_s, group._group = 5.0, SimpleNamespace(broadcast=lambda *_: Work())  # type: ignore[assignment]

    def over() -> bool:
        arrived.set()
        return True

    group.broadcast(torch.zeros(1), over)


def test_a_dtype_that_no_engine_takes_is_refused_and_the_server_does_not_wait() -> None:
    with served(empty_engine()) as address:
        ours = remote(address)
        began = time.monotonic()
        read: Iterator[tuple[str, Tensor]] = iter([("w", torch.zeros(2, dtype=torch.int64)), *weights_of(tiny_model())])
        with pytest.raises(RolloutError):
            ours.load_weights(read, 0)
        assert next(read, None) is None
        assert time.monotonic() - began < 4


# --- the channel ------------------------------------------------------------------------------------------------------


def posted(address: str, body: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*split_address(address), timeout=5)
    connection.request("POST", "/", body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_nobody_is_listened_to_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(empty_engine()) as address:
        assert posted(address, b"{}")[0] == 403
        assert posted(address, b"{}", X_Digest="0" * 64, Authorization="0" * 64)[0] == 403
        monkeypatch.setenv(SECRET, "another secret of theirs")
        with pytest.raises(RolloutError, match=f"the trainer's {SECRET} is not the server's"):
            remote(address)


def test_a_request_is_not_exchanged_for_another() -> None:
    import hashlib
    import hmac

    digest = hashlib.sha256(b"{}").hexdigest()
    signed = {"X_Digest": digest, "Authorization": hmac.new(TOKEN.encode(), digest.encode(), "sha256").hexdigest()}
    with served(empty_engine()) as address:
        assert posted(address, b"[]", **signed) == (400, "the request is damaged.")
        connection = http.client.HTTPConnection(*split_address(address), timeout=5)
        connection.putrequest("POST", "/")
        for name, value in {**signed, "Content_Length": str(2**40)}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_a_secret_is_needed_that_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ConfigError, match="has 5 characters, at least 16 are needed"):
        secret()
    monkeypatch.delenv(SECRET)
    with pytest.raises(ConfigError, match=f"{SECRET}: is not set"):
        secret()


@pytest.mark.parametrize("address", ["node1", "node1:", ":29600", "http://node1:29600", "node1:port", "a:1/x"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        split_address(address)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"--listen 127\.0\.0\.1:"):
        Desk(f"127.0.0.1:{taken.getsockname()[1]}", TOKEN.encode())


def test_a_server_that_is_not_there_is_waited_for_and_no_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"not there after 0\.3 s .* Start it \(capo-megatron engine CONFIG\)"):
        remote(f"127.0.0.1:{port}", wait_s=0.3)
    assert time.monotonic() - began < 5


class Broken:
    """A server that says this much of an answer to every request, and then ends or falls silent."""

    def __init__(self, said: bytes, ends: bool) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.requests, self._said, self._ends, self._kept = 0, said, ends, []
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                peer, _ = self.socket.accept()
            except OSError:
                return
            self.requests += 1
            peer.recv(65536)
            peer.sendall(self._said)
            if self._ends:
                peer.close()
            self._kept.append(peer)


def line(address: str, silence_s: float = 5.0, limit_s: float = 20.0) -> Line:
    return Line(address, TOKEN.encode(), "session", silence_s, limit_s)


BEATS = b"HTTP/1.0 200 OK\r\n\r\n\n\n"


@pytest.mark.parametrize("said", [b"", BEATS, BEATS + b'{"value": [[[1, 2'], ids=["nothing", "beats", "half"])
def test_a_server_that_dies_in_the_middle_of_an_answer_is_known_to_be_dead(said: bytes) -> None:
    broken = Broken(said, ends=True)
    with broken.socket, pytest.raises(RolloutError, match=r"lost during generate .* the same train command then cont"):
        line(broken.address).call("generate")
    assert broken.requests == 2, "a broken connection is tried once more"


def test_a_server_that_falls_silent_is_given_up() -> None:
    broken = Broken(BEATS, ends=False)
    began = time.monotonic()
    with broken.socket, pytest.raises(RolloutError, match=r"nothing was heard of it for 0\.5 s"):
        line(broken.address, silence_s=0.5).call("generate")
    assert time.monotonic() - began < 3


def test_a_call_that_takes_too_long_is_given_up() -> None:
    broken = Broken(BEATS, ends=False)
    with broken.socket, pytest.raises(RolloutError, match=r"more than rollout\.separate\.limit_s=0"):
        line(broken.address, limit_s=0.0).call("generate")


def test_an_answer_that_got_lost_is_given_again_and_the_work_is_not_done_again() -> None:
    desk = Desk("127.0.0.1:0", TOKEN.encode())
    ours = line(f"127.0.0.1:{desk.port}")
    opening = ours.start("open", clients=2)
    call = desk.take(5.0)
    assert call is not None
    body = json.dumps({"session": "session", "number": 0, "name": "open", "arguments": {"clients": 2}}).encode()
    again = desk.hand_in(body, call.digest)
    assert again is call
    call.succeed([1])
    assert opening.result() == [1]
    assert desk.take(0.05) is None
    with pytest.raises(RolloutError, match="is not the one that other trainer ranks have made"):
        desk.hand_in(body, "another digest")
    desk.close()
