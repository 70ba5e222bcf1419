"""Weights from a trainer rank to the ranks of an engine server, by broadcast, a bucket at a time.

The sender is rank 0 of a process group that has nothing to do with either side's default group: neither program has to
know of the other's ranks as it starts. Between GPUs it is NCCL's, else gloo's.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from capo_megatron.errors import RolloutError

_ALIGNED = 16  # bytes: a tensor in a bucket starts where any dtype may
_POLL_S = 0.0005
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def never() -> bool:
    return False


class Group:
    """Process group of a sender (rank 0) and its receivers."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, backend: str, device: torch.device, patience_s: float
    ) -> None:
        """Collective. A broadcast that takes more than `patience_s` fails. Raises RolloutError if a rank is missing."""
        self.device, self._backend, self._patience_s = device, backend, patience_s
        make = _nccl if backend == "nccl" else _gloo
        try:
            self._group: Any = make(store, rank, size, patience_s)
        except RuntimeError as error:
            raise RolloutError(f"weights: trainer and server do not meet over {backend}: {error}") from error

    def broadcast(self, tensor: Tensor, over: Callable[[], bool] = never) -> None:
        """Give rank 0's tensor to all, unless the other side is known to be `over`. Raises RolloutError, and is closed.

        A thread may be interrupted meanwhile: it looks again and again whether that is done.
        """
        if self._group is None:
            raise RolloutError("weights: the connection between trainer and engine server was given up before.")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        deadline, why = time.monotonic() + self._patience_s, ""
        try:
            work = self._group.broadcast([tensor], options)
            while not work.is_completed() and not why:
                if over() and not work.is_completed():  # it may have been over because all had come
                    why = "the other side has given up"
                elif time.monotonic() > deadline:
                    why = f"it took more than rollout.separate.silence_s={self._patience_s:g}"
                time.sleep(_POLL_S)
            if not why:
                work.wait()
        except RuntimeError as error:
            why = str(error)
        if why:
            work = None  # it holds the connections
            self.close()
            raise RolloutError(f"weights: a broadcast between trainer and engine server failed: {why}.")

    def close(self) -> None:
        """Break the connections, so that the other side does not wait. The group is of no use any more."""
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl":
            group.abort()
        # Gloo breaks them when the last reference goes, which first waits for what is under way.
        threading.Thread(target=lambda _: None, args=(group,), daemon=True).start()


def host_store(patience_s: float) -> dist.TCPStore:
    """A store on a free port of this machine, through which a group's ranks find each other."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=patience_s))


def reach_store(host: str, port: int, patience_s: float) -> dist.TCPStore:
    """The store of `host_store`. Raises RolloutError if it is not there."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience_s))
    except RuntimeError as error:
        raise RolloutError(f"weights: the trainer cannot be reached at {host}:{port}: {error}") from error


def _gloo(store: dist.Store, rank: int, size: int, patience_s: float) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=patience_s))


def _nccl(store: dist.Store, rank: int, size: int, patience_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * patience_s)  # its own watchdog would end the process
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group._set_sequence_number_for_group()
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


# --- buckets ----------------------------------------------------------------------------------------------------------


def send(
    group: Group, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, over: Callable[[], bool] = never
) -> None:
    """Give every weight to the receivers, in buckets of at most so many bytes, or of one tensor.

    At a time there are one bucket and one tensor. Raises RolloutError at the first bucket that cannot be sent, with the
    rest of `weights` not read.
    """
    number = 0
    for number, (entries, data) in enumerate(_packed(weights, bucket_bytes, group.device), start=1):
        _send_bucket(group, number, entries, data, over)
    _send_bucket(group, number + 1, None, None, over)


def _send_bucket(group: Group, number: int, entries: Any, data: Tensor | None, over: Callable[[], bool]) -> None:
    header = torch.frombuffer(bytearray(json.dumps([number, entries]).encode()), dtype=torch.uint8)
    sizes = torch.tensor([len(header), 0 if data is None else len(data)])
    for part in (sizes, header, *([] if data is None else [data])):
        group.broadcast(part.to(group.device), over)


def _packed(
    weights: Iterable[tuple[str, Tensor]], most: int, device: torch.device
) -> Iterator[tuple[list[tuple[str, str, list[int], int]], Tensor]]:
    """([(name, dtype, shape, first byte)], bytes) of every bucket."""
    bucket = torch.empty(most, dtype=torch.uint8, device=device)
    entries: list[tuple[str, str, list[int], int]] = []
    filled = 0
    for name, tensor in weights:
        start = -(-filled // _ALIGNED) * _ALIGNED
        if entries and start + tensor.nbytes > most:
            yield entries, bucket[:filled]
            entries, start = [], 0
        if str(tensor.dtype) not in _DTYPES:
            raise RolloutError(f"weights: {name} has dtype {tensor.dtype}, expected one of {', '.join(_DTYPES)}.")
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        entry = (name, str(tensor.dtype), list(tensor.shape), start)
        if tensor.nbytes > most:
            yield [entry], flat
            filled = 0
            continue
        bucket[start : start + tensor.nbytes].copy_(flat)
        entries.append(entry)
        filled = start + tensor.nbytes
    if entries:
        yield entries, bucket[:filled]


class Received:
    """The weights that `send` sends, as an iterator that ends early, with a `fault`, where one of its buckets is lost.

    It raises nothing: an engine that takes weights has to be told that there are no more.
    """

    def __init__(self, group: Group) -> None:
        self.fault = ""
        self._group = group

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        expected = 1
        try:
            while (bucket := self._bucket(expected)) is not None:
                yield from bucket
                expected += 1
        except RolloutError as error:
            self.fault = str(error)

    def _bucket(self, expected: int) -> list[tuple[str, Tensor]] | None:
        """The next bucket's weights; None at the end."""
        sizes = self._taken(2, torch.int64).tolist()
        number, entries = json.loads(bytes(self._taken(sizes[0], torch.uint8).tolist()))
        data = self._taken(sizes[1], torch.uint8) if sizes[1] else None
        if number != expected:
            self._group.close()
            raise RolloutError(f"weights: bucket {expected} was lost; bucket {number} came in its place.")
        if entries is None:
            return None
        assert data is not None, "a bucket holds a tensor"
        return [
            (name, data[start : start + math.prod(shape) * _DTYPES[dtype].itemsize].view(_DTYPES[dtype]).view(shape))
            for name, dtype, shape, start in entries
        ]

    def _taken(self, count: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(count, dtype=dtype, device=self._group.device)
        self._group.broadcast(tensor)
        return tensor
