#!/usr/bin/env bash
# Starts and stops a Ray cluster on machines that ssh reaches without a password.
#
#   launch/ssh_cluster.sh up   HOSTS [--port P] [--venv DIR] [-- OPTIONS OF ray start]
#   launch/ssh_cluster.sh down HOSTS [--port P]
#
# HOSTS is a file with a machine a line, the head first: NAME, or NAME ADDRESS where Ray shall listen on
# another network than that of the machine's default route. Empty lines and # comments are skipped. The
# repository and its environment (--venv, default .venv) lie under the same path on all of them.
#
# `up` again starts what does not run. `down` ends what `up` started on this port and no other Ray. Only who has the
# token in ~/.ray/auth_token (made on the head, copied to the others) can use the cluster.
set -euo pipefail

usage() { sed -n '4,5s/^# *//p' "$0" >&2; }

refuse() {
    echo "error: $1" >&2
    exit 2
}

# What runs on every machine: bash -s -- ACTION HOST PORT ROOT VENV ROLE ADDRESS HEAD [OPTIONS...], after `token=...`.
# shellcheck disable=SC2016  # expanded there, not here
readonly THERE='
set -euo pipefail
action=$1 host=$2 port=$3 root=$4 venv=$5 role=$6 address=$7 head=$8
shift 8
base=/tmp/fenwick-cluster-$(id -u)-$port  # on a local disk: process ids mean nothing elsewhere
state=$base/$host
fail() { echo "error: $host: $1" >&2; exit 1; }
alive() { [[ -f $state/pid ]] && kill -0 "$(<"$state/pid")" 2>/dev/null; }
# After a restart of the machine the number may be that of another process.
runs() { alive && tr "\0" " " <"/proc/$(<"$state/pid")/cmdline" | grep -q "ray start --block"; }

if [[ $action == token || $action == up ]]; then
    cd "$root" 2>/dev/null || fail "the repository is missing: got $root; expected the same path on every machine"
    [[ -x $venv/bin/ray ]] || fail "no ray in the environment: got $venv; expected the folder of an environment; make it there or give --venv"
fi
case $action in
token)
    (umask 077 && "$venv/bin/ray" get-auth-token --generate 2>/dev/null </dev/null) || fail "ray get-auth-token failed"
    ;;
up)
    if runs; then echo "$host: runs already"; exit 0; fi
    file=$HOME/.ray/auth_token
    if [[ ! -f $file ]]; then
        mkdir -p "${file%/*}"
        (umask 077 && printf %s "$token" >"$file")
    elif [[ $(<"$file") != "$token" ]]; then
        fail "another token is there: got $file; expected that of the head or none; remove it if no other Ray uses it"
    fi
    (umask 077 && mkdir -p "$state")
    [[ -O $base ]] || fail "the folder of the cluster is not ours: got $base; expected none; use another --port"
    # Told to end, a node would wait half a minute for work that goes on.
    export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
    # Where memory is short Ray would end an agent, and all ranks of its host with it.
    export RAY_memory_monitor_refresh_ms=0
    options=()
    [[ -z $address ]] || options+=(--node-ip-address "$address")
    if [[ $role == head ]]; then
        options+=(--head --port "$port" --ray-client-server-port $((port + 1)) --temp-dir "$base/ray")
        options+=(--dashboard-host 127.0.0.1 --dashboard-port $((port + 2)))
    else
        # Ray itself would try for minutes.
        timeout 10 bash -c "exec 3<>/dev/tcp/$head/$port" 2>/dev/null ||
            fail "the head does not answer: got $head:$port; expected its name or address in this network; write the address behind its name in the list"
        options+=(--address "$head:$port")
    fi
    : >"$state/log"
    setsid nohup "$venv/bin/ray" start --block "${options[@]}" "$@" >>"$state/log" 2>&1 </dev/null &
    echo $! >"$state/pid"
    for ((i = 0; i < 240; i++)); do
        alive || fail "ray start ended: $(grep -v "^ *$" "$state/log" | tail -n 1)"
        if grep -q "Ray runtime started" "$state/log"; then echo "$host: started"; exit 0; fi
        sleep 0.5
    done
    fail "ray start says nothing after 120 s; see $state/log there"
    ;;
down)
    if runs; then
        pid=$(<"$state/pid")
        kill -TERM "$pid"
        for ((i = 0; i < 40; i++)); do alive || break; sleep 0.5; done
        kill -KILL -- "-$pid" 2>/dev/null || true  # the rest of its process group, if any
        echo "$host: stopped"
    else
        echo "$host: did not run"
    fi
    rm -rf "$state"
    compgen -G "$base/*/pid" >/dev/null || rm -rf "$base"
    ;;
esac
'

# there ACTION LINE ROLE: runs THERE on the machine of a line of HOSTS.
there() {
    local action=$1 name address role=$3 status
    read -r name address <<<"$2"
    local words=(bash -s -- "$action" "$name" "$port" "$root" "$venv" "$role" "$address" "$head_address" "${options[@]}")
    # ssh hands the remote shell one string. The token goes through stdin: arguments can be seen by everybody.
    printf 'token=%q\n%s' "$token" "$THERE" |
        ssh -o BatchMode=yes -o ConnectTimeout=10 "$name" "$(printf '%q ' "${words[@]}")" && return
    status=$?
    [[ $status -ne 255 ]] ||
        echo "error: $name: ssh cannot reach it; expected that ssh $name true works without a password" >&2
    return "$status"
}

# everywhere ACTION LINE...: the same on several machines at once; fails if one does.
everywhere() {
    local action=$1 line pids=() failed=0
    shift
    for line in "$@"; do
        there "$action" "$line" worker &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    return "$failed"
}

[[ $# -ge 2 && ($1 == up || $1 == down) ]] || { usage; exit 2; }
action=$1 hosts_file=$2
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
port=6379 venv=$root/.venv token="" options=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --port | --venv)
        [[ $# -ge 2 ]] || refuse "$1 has no value: got nothing behind it; expected one"
        declare "${1#--}=$2"
        shift 2
        ;;
    --) shift && options=("$@") && break ;;
    *) refuse "unknown option: got $1; expected --port, --venv or --" ;;
    esac
done
[[ $port =~ ^[0-9]+$ && $port -ge 1024 && $port -le 65533 ]] ||
    refuse "--port is no port: got $port; expected 1024 to 65533"
[[ $venv == /* ]] || venv=$PWD/$venv
[[ -f $hosts_file ]] || refuse "no list of hosts: got $hosts_file; expected a file with a machine a line"
mapfile -t hosts < <(sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//; /^$/d' "$hosts_file")
[[ ${#hosts[@]} -gt 0 ]] || refuse "no host in the list: got $hosts_file; expected a machine a line"
twice=$(printf '%s\n' "${hosts[@]%%[[:space:]]*}" | sort | uniq -d)
[[ -z $twice ]] || refuse "a host is listed twice: got ${twice%%$'\n'*}; expected each once"
read -r head_name head_address <<<"${hosts[0]}"
head_address=${head_address:-${head_name#*@}}

if [[ $action == down ]]; then
    everywhere down "${hosts[@]:1}" && failed=0 || failed=1
    there down "${hosts[0]}" head || failed=1
    exit "$failed"
fi
token=$(there token "${hosts[0]}" head)
there up "${hosts[0]}" head
everywhere up "${hosts[@]:1}"
echo "ready: python -m launch CONFIG --nodes ${#hosts[@]} --gpus-per-node G --address $head_address:$port   (on $head_name)"
