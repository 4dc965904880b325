#!/usr/bin/env bash
# The front door: set-up, recipes, tests and tools. `./launch.sh --help` lists them.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
stamp=$venv/ready       # what .venv was made from; written last: without it the first set-up was interrupted

usage() {
    cat <<'END'
Krea-2 NFT: online reinforcement learning of the Krea-2 text-to-image model, in one file.

usage: ./launch.sh [COMMAND] [OPTIONS]

  (no command)  set up if needed, then train with the recipe for this machine: without a GPU, the toy
  sync2         train on 2 GPUs, 8 prompts x 8 samples a rollout
  sync8         train on 8 GPUs, 6 prompts x 8 samples a rollout
  toy           build the toy model and its prompts; training does so by itself when they are missing
  setup         make or update the environment .venv; every other command does so first
  test          run the tests; OPTIONS are pytest's, e.g. ./launch.sh test -k loss
  bench         measure; ./launch.sh bench --help

OPTIONS are passed on unchanged. --recipe toy trains the toy on any machine; --recipe toy --help: all settings.

environment variables
  NFT_PYTHON            a Python that has all packages, used as it is: no set-up, no .venv
  NPROC                 how many processes train, in place of the recipe's number; works without GPUs too
  CUDA_VISIBLE_DEVICES  the GPUs to use; empty means none
  OMP_NUM_THREADS       CPU threads of each process; 1 unless set, on a machine without GPUs
END
}

stop() { echo "launch.sh: $*" >&2; exit 2; }

# ------------------------------------------------------------------------------------------------------------
# Hardware
# ------------------------------------------------------------------------------------------------------------

find_gpus() {           # sets machine = cpu | gpu, and gpus = how many may be used
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    if [[ $gpus == 0 ]]; then machine=cpu; return; fi
    machine=gpu
    case ${CUDA_VISIBLE_DEVICES-all} in
        all) ;;
        ''|-1) gpus=0 ;;
        *) local ids; IFS=, read -ra ids <<<"$CUDA_VISIBLE_DEVICES"; gpus=${#ids[@]} ;;
    esac
}

recipe_ranks() {        # GPUs of a recipe; the toy is not here because it trains on the CPU
    case $1 in
        sync2) echo 2 ;;
        sync8) echo 8 ;;
        *) return 1 ;;
    esac
}

# ------------------------------------------------------------------------------------------------------------
# Set-up
# ------------------------------------------------------------------------------------------------------------

is_ready() {            # $1 = run | test; an environment for tests serves runs as well
    [[ -f $stamp && -x $venv/bin/python ]] || return 1
    [[ $(<"$stamp") == "$wanted $1" || $(<"$stamp") == "$wanted test" ]]
}

set_up() {              # $1 = run | test; sets python = the interpreter to use
    if [[ -n ${NFT_PYTHON:-} ]]; then
        python=$(command -v -- "$NFT_PYTHON") || stop "NFT_PYTHON=$NFT_PYTHON is not a program to run"
        return
    fi
    local wanted list=requirements.txt
    python=$venv/bin/python
    wanted="$(cat "$root"/requirements*.txt | cksum) $machine"
    if is_ready "$1"; then return; fi
    if [[ $1 == test ]]; then list=requirements-test.txt; fi
    (   # one set-up at a time: whoever comes second waits, and then finds the work done
        flock -n 9 || { echo "Waiting for another set-up of $venv to finish."; flock 9; }
        if is_ready "$1"; then exit; fi
        SECONDS=0
        if [[ -f $stamp && -x $python ]]; then
            echo "Updating $venv from $list."
            echo unfinished >"$stamp"
        else
            make_venv
        fi
        "$python" -m pip install --disable-pip-version-check --no-input -r "$root/$list"
        echo "$wanted $1" >"$stamp.part"
        mv "$stamp.part" "$stamp"
        echo "Set-up took $SECONDS s."
    ) 9>>"$root/.venv.lock"
}

make_venv() {           # from nothing, also where an interrupted set-up left something
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "Python 3.11 or newer is needed: put it first on PATH as python3, or set NFT_PYTHON"
    echo "Setting up $venv from $list, once: a download of about 3 GB, most of it PyTorch, and 7 GB on disk."
    python3 -m venv --clear "$venv" || stop "python3 -m venv failed: on Debian and Ubuntu it needs the" \
        "package python3-venv; or set NFT_PYTHON"
}

# ------------------------------------------------------------------------------------------------------------
# Commands; each ends in exec, so that Ctrl-C and SIGTERM reach the program itself
# ------------------------------------------------------------------------------------------------------------

start() {               # $@ = the interpreter's arguments
    set_up run
    if [[ $gpus == 0 ]]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"; fi
    exec "$python" "$@"
}

train() {               # $@ = the trainer's options; looked at only to know how many processes to start
    local ranks=${NPROC:-} recipe='' last='' option
    for option; do
        case "$last $option" in
            *' --help'|*' -h') ranks=1 ;;
            '--recipe toy'|*' --recipe=toy'|'--device cpu'|*' --device=cpu') gpus=0 ;;
            '--recipe '*|*' --recipe='*) recipe=${option#--recipe=} ;;
        esac
        last=$option
    done
    if [[ -z $ranks && $gpus != 0 ]]; then
        ranks=$(recipe_ranks "$recipe" || echo "$gpus")
        (( ranks <= gpus )) || stop "recipe $recipe takes $ranks GPUs, not $gpus; NPROC=$gpus uses those"
    fi
    ranks=${ranks:-1}
    [[ $ranks =~ ^[1-9][0-9]*$ ]] || stop "NPROC must be a whole number above 0, not '$ranks'"
    if [[ $ranks == 1 ]]; then start "$root/nft_krea2.py" "$@"; fi
    start -m torch.distributed.run --standalone --nproc_per_node="$ranks" "$root/nft_krea2.py" "$@"
}

command=${1:-}
case $command in -h|--help|help) usage; exit ;; esac
find_gpus
case $command in
    ''|-*) train "$@" ;;
    setup)
        [[ $# == 1 ]] || stop "setup takes no options, not '$2'"
        set_up run; echo "Ready: $python" ;;
    test)
        set_up test
        export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
        exec "$python" -m pytest --durations=10 "$root/test_smoke.py" "${@:2}" ;;
    toy) start "$root/tools/make_toy.py" "${@:2}" ;;
    *)
        if recipe_ranks "$command" >/dev/null; then train --recipe "$@"; fi
        [[ $command =~ ^[a-z_]+$ && -f $root/tools/$command.py ]] ||
            stop "unknown command '$command'; ./launch.sh --help lists them, --recipe $command takes a recipe"
        start "$root/tools/$command.py" "${@:2}" ;;
esac
