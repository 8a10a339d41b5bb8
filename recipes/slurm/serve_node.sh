#!/bin/bash
# Start vLLM servers on the GPUs of this machine. Each is in a list of URLs while it runs (servers.urls_file):
#
#     bash recipes/slurm/serve_node.sh MODEL SERVERS_FILE --dtype bfloat16 --max-model-len 8192
#
# Further arguments are vllm's. Environment variables: GPUS (8), GPUS_PER_SERVER (1), FIRST_PORT (8000), and ADDRESS,
# under which the trainer reaches this machine (by default its first one). Ctrl-C or SIGTERM ends the servers.
set -uo pipefail

model=${1:?usage: serve_node.sh MODEL SERVERS_FILE [OPTIONS OF vllm serve]}
list=${2:?usage: serve_node.sh MODEL SERVERS_FILE [OPTIONS OF vllm serve]}
shift 2
gpus=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
width=${GPUS_PER_SERVER:-1}
first_port=${FIRST_PORT:-8000}
address=${ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}

# Machines may change the list at once, and a run may read it at any time: so one writes, and renames.
change_list() { # change_list join|leave URL
    (
        flock 9
        touch "$list"
        grep -vxF "$2" "$list" >"$list.new"
        if [ "$1" = join ]; then echo "$2" >>"$list.new"; fi
        mv "$list.new" "$list"
    ) 9>>"$list.lock"
}

serve() { # serve FIRST_GPU PORT OPTIONS...: one server, and its line in the list
    local devices url="http://$address:$2" server
    devices=$(seq -s , "$1" $(($1 + width - 1)))
    shift
    CUDA_VISIBLE_DEVICES=$devices VLLM_SERVER_DEV_MODE=1 vllm serve "$model" --host "$address" --port "$1" \
        --tensor-parallel-size "$width" \
        --worker-extension-cls agent_r1_trl.generation.vllm.worker_extension.PolicyWorker \
        --logprobs-mode processed_logprobs --generation-config vllm "${@:2}" &
    server=$!
    trap 'change_list leave "$url"; kill "$server"' TERM
    until curl --silent --fail --max-time 5 --output /dev/null "$url/health"; do
        if ! kill -0 "$server" 2>/dev/null; then
            echo "The server $url ended before it answered." >&2
            return 1
        fi
        sleep 2
    done
    change_list join "$url"
    echo "$url has joined $list"
    wait "$server" # a signal ends this wait, not the server
    change_list leave "$url"
    wait "$server"
}

parts=()
for ((gpu = 0; gpu + width <= gpus; gpu += width)); do
    serve "$gpu" $((first_port + gpu)) "$@" &
    parts+=($!)
done
trap 'kill "${parts[@]}" 2>/dev/null' TERM INT
wait
wait
