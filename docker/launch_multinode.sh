#!/usr/bin/env bash
# This node's part of a run on several nodes; see --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: launch_multinode.sh [OPTION...] COMMAND [ARGUMENT...]

Starts this node's ranks of `capo-megatron COMMAND ARGUMENT...` in the image, under torchrun. Run it on every node with
the same arguments but for --node-rank. The folder from which it is run must be the same on all nodes (a shared file
system): it is mounted at its own path, so that configs, models and outputs are found as outside.

  launch_multinode.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 train run.yaml parallel.tensor=8
  launch_multinode.sh --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train run.yaml parallel.tensor=8

The nodes
  --nnodes N             nodes of this run (default: 1)
  --node-rank R          which of them this is, from 0 (default: 0); 0 is where the others meet
  --master-addr HOST     node 0's address, as the others reach it (needed unless --nnodes 1)
  --master-port PORT     a free port there (default: 29500)
  --nproc-per-node P     ranks on each node, one per GPU (default: 8)
  --run-id NAME          tells runs apart that could meet at one port (default: capo-megatron)
  --rendezvous KIND      c10d: a node that failed before the start may be started again; torch counts the ranks in the
                         order of the nodes' addresses as text. static: by --node-rank (default: c10d)
  --wait SECONDS         how long nodes wait for each other at the start (default: 900)
  --node-addr ADDR       this node's own address (default: that of its route to node 0)
  --interface NAME       network interface for NCCL's bootstrap and gloo (default: the one that has the node's address)

The container
  --image NAME           (default: capo-megatron, see docker/Dockerfile)
  --gpus WHICH           as docker run's, or none (default: all)
  --mount PATH           a further folder to mount at its own path, such as that of models; may be repeated
  --shm-size SIZE        /dev/shm of its own, e.g. 64g (default: the host's, by --ipc host)
  --infiniband WHEN      yes, no or auto: pass /dev/infiniband on if there is one (default: auto)
  --no-docker            torchrun directly, in this environment

  --dry-run              print the command instead of running it
  --help                 this text

Variables named NCCL_*, GLOO_*, UCX_*, TORCH_*, CUDA_*, NVTE_*, OMP_*, HF_* and WANDB_* are passed into the container
(CUDA_HOME and CUDA_PATH are not: it has a CUDA of its own).
SIGTERM lets the step finish and saves it; the same command then continues.
Exit codes: 0 done, 2 bad arguments, else torchrun's or docker's.
END
}

refuse() {
  printf 'launch_multinode.sh: %s\n' "$1" >&2
  exit 2
}

whole() { # option, value, least, most
  if [[ ! $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
    refuse "$1 $2: expected a whole number from $3 to $4."
  fi
}

one_of() { # option, value, allowed...
  local option=$1 value=$2
  shift 2
  [[ " $* " == *" $value "* ]] || refuse "$option $value: expected one of: $*."
}

nnodes=1 node_rank=0 master_addr='' master_port=29500 nproc=8 run_id=capo-megatron rendezvous=c10d wait=900
node_addr='' interface='' image=capo-megatron gpus=all shm_size='' infiniband=auto mounts=() docker=yes dry_run=no

while (($#)); do
  option=$1
  case $option in
    --help | -h) usage && exit ;;
    --no-docker) docker=no && shift && continue ;;
    --dry-run) dry_run=yes && shift && continue ;;
    --) shift && break ;;
    --*=*) # --nnodes=2 is --nnodes 2
      set -- "${option%%=*}" "${option#*=}" "${@:2}"
      continue
      ;;
    -*) ;;
    *) break ;;
  esac
  value=${2-}
  case $option in
    --nnodes) nnodes=$value ;;
    --node-rank) node_rank=$value ;;
    --master-addr) master_addr=$value ;;
    --master-port) master_port=$value ;;
    --nproc-per-node) nproc=$value ;;
    --run-id) run_id=$value ;;
    --rendezvous) rendezvous=$value ;;
    --wait) wait=$value ;;
    --node-addr) node_addr=$value ;;
    --interface) interface=$value ;;
    --image) image=$value ;;
    --gpus) gpus=$value ;;
    --mount) mounts+=("$value") ;;
    --shm-size) shm_size=$value ;;
    --infiniband) infiniband=$value ;;
    *) refuse "$option: no such option. Options come before the command; --help lists them." ;;
  esac
  [[ -n $value ]] || refuse "$option: its value is missing. --help shows what it takes."
  shift 2
done

whole --nnodes "$nnodes" 1 100000
whole --node-rank "$node_rank" 0 $((10#$nnodes - 1))
whole --master-port "$master_port" 1 65535
whole --nproc-per-node "$nproc" 1 1024
whole --wait "$wait" 1 1000000
one_of --rendezvous "$rendezvous" c10d static
one_of --infiniband "$infiniband" yes no auto
(($#)) || refuse "no command. Give what capo-megatron gets, e.g. train run.yaml."
if [[ -z $master_addr ]]; then
  ((10#$nnodes == 1)) || refuse "--master-addr: missing, with --nnodes $nnodes. Give all nodes the address of node 0."
  master_addr=127.0.0.1
fi
for folder in ${mounts[@]+"${mounts[@]}"}; do
  [[ $folder == /* && -d $folder ]] || refuse "--mount $folder: expected the absolute path of a folder of this node."
done

run() {
  if [[ $dry_run == yes ]]; then
    printf -v line '%q ' "$@"
    echo "${line% }"
    exit
  fi
  exec "$@"
}

# --- in the image: this script again, in there ------------------------------------------------------------------------

if [[ $docker == yes ]]; then
  if [[ $dry_run == no ]] && ! command -v docker > /dev/null; then
    refuse "docker: not found. Install it, or use --no-docker in an environment where capo-megatron is installed."
  fi
  # /dev/infiniband with memory that may be locked is what RDMA takes; the host's network is what NCCL's sockets take.
  # Nothing limits how long a stopped container may take to finish its step and save it, but the hour.
  flags=(--rm --init --network host --stop-timeout 3600)
  flags+=(--ulimit memlock=-1 --ulimit stack=67108864 --cap-add IPC_LOCK)
  [[ $gpus == none ]] || flags+=(--gpus "$gpus")
  if [[ -n $shm_size ]]; then flags+=(--shm-size "$shm_size"); else flags+=(--ipc host); fi
  if [[ $infiniband == yes || ($infiniband == auto && -e /dev/infiniband) ]]; then
    flags+=(--device /dev/infiniband)
  else
    flags+=(--env NCCL_IB_DISABLE=1)
  fi
  # As the caller, to whom the outputs then belong; the image knows no home of theirs.
  flags+=(--user "$(id -u):$(id -g)" --env HOME=/tmp --env USER=capo)
  while read -r name; do
    flags+=(--env "$name") # by name: a key must not be seen in the list of processes
  done < <(compgen -e | grep -E '^(NCCL|GLOO|UCX|TORCH|CUDA|NVTE|OMP|HF|WANDB|CAPO)_' | grep -vE '^CUDA_(HOME|PATH)$')
  for folder in "$PWD" ${mounts[@]+"${mounts[@]}"}; do
    flags+=(--volume "$folder:$folder")
  done
  node=(--nnodes "$nnodes" --node-rank "$node_rank" --master-addr "$master_addr" --master-port "$master_port")
  node+=(--nproc-per-node "$nproc" --run-id "$run_id" --rendezvous "$rendezvous" --wait "$wait")
  [[ -z $node_addr ]] || node+=(--node-addr "$node_addr")
  [[ -z $interface ]] || node+=(--interface "$interface")
  run docker run "${flags[@]}" --workdir "$PWD" --entrypoint launch_multinode.sh "$image" --no-docker "${node[@]}" "$@"
fi

# --- torchrun ---------------------------------------------------------------------------------------------------------

python=${PYTHON:-python3}

# Prints the node's address and the interface that has it. Without them torch takes what the host's name resolves to,
# which on many systems is 127.0.1.1, and the nodes wait for each other for ever.
locate() {
  "$python" - "$nnodes" "$node_rank" "$master_addr" "$node_addr" <<'END'
import socket
import sys


def refuse(text):
    print(f"launch_multinode.sh: {text}", file=sys.stderr)
    sys.exit(2)


try:
    from psutil import net_if_addrs
except ImportError:
    refuse(f"{sys.executable}: no psutil. Activate the environment where capo-megatron is installed, or set PYTHON.")

nodes, rank, master, address = sys.argv[1:]
try:
    target = socket.gethostbyname(master)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing, it chooses a route
        probe.connect((target, 9))
        found = probe.getsockname()[0]
except OSError as error:
    refuse(f"--master-addr {master}: no way there ({error.strerror}). Give an IPv4 address that is reached from here.")
named = f"--master-addr {master}" + (f" ({target})" if target != master else "")
if not address and rank.strip("0") == "" and found != target:
    refuse(f"{named}: not an address of this node, which is node 0 by --node-rank. Run this there, or mend either.")
address = address or found
if int(nodes) > 1 and address.startswith("127."):
    refuse(f"{named}: only this node can reach that. Give node 0's address in the network.")
own = {
    item.address: name for name, items in net_if_addrs().items() for item in items if item.family == socket.AF_INET
}
if address not in own:
    refuse(f"--node-addr {address}: this node does not have it. It has: {', '.join(own)}.")
print(address, own[address])
END
}

if [[ -z $node_addr || -z $interface ]]; then
  located=$(locate) || exit 2
  node_addr=${located% *}
  interface=${interface:-${located#* }}
fi
torchrun=(env "GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}")
torchrun+=("NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}")
# Seconds that ranks have after SIGTERM to finish their step and save it.
torchrun+=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}")
torchrun+=("$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$nproc" --max-restarts 0)
if [[ $rendezvous == static ]]; then
  torchrun+=(--node-rank "$node_rank" --master-addr "$master_addr" --master-port "$master_port")
  torchrun+=(--rdzv-id "$run_id" --rdzv-conf "timeout=$wait")
else
  is_host=$( ((10#$node_rank == 0)) && echo true || echo false)
  torchrun+=(--rdzv-backend c10d --rdzv-endpoint "$master_addr:$master_port" --local-addr "$node_addr")
  torchrun+=(--rdzv-id "$run_id" --rdzv-conf "is_host=$is_host,join_timeout=$wait,read_timeout=$wait")
fi
run "${torchrun[@]}" -m capo_megatron "$@"
