# Helpers of the nested jobs; each job begins with `. "$JOB/jobs/lib.sh"`. Runs in busybox sh inside the
# machine that tests/nested/run boots. A job's exit status is its result: 0 pass, 77 skip, else fail;
# the last line it prints is the reason.
#   $BIN      the programs of the build under test    $GUEST  kernel, initrd and cmdline of stock Linux
#   $RESULTS  a folder whose files reach the host     $JOB    everything that was brought in
set -u

export TINE_STATE=/tmp/tine-state
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
tine=$BIN/tine
vmm=$BIN/tine-vmm

# The logs of all machines go to the host, whatever the end.
keep_logs()
{
    cp "$TINE_STATE"/*.log "$RESULTS"/ 2>/dev/null
    return 0
}
trap keep_logs EXIT

fail()
{
    keep_logs
    for log in "$TINE_STATE"/*.log; do
        [ -e "$log" ] || continue
        echo "--- $log"
        tail -n 15 "$log"
    done
    echo "$*"
    exit 1
}

skip()
{
    echo "$*"
    exit 77
}

# step TEXT: a line with the time since boot, so that a log shows where the time went.
step()
{
    echo "[$(cut -d' ' -f1 /proc/uptime)] $*"
}

# expect WHAT WANT CMD...: the command succeeds and prints WANT (trailing newlines aside).
expect()
{
    what=$1 want=$2
    shift 2
    got=$("$@") || fail "$what: $* ended with status $?"
    [ "$got" = "$want" ] || fail "$what: expected '$want', got '$got'"
}

# expect_status WHAT STATUS CMD...: the command ends with that exit status.
expect_status()
{
    what=$1 want=$2
    shift 2
    got=0
    "$@" || got=$?
    [ "$got" = "$want" ] || fail "$what: expected status $want, got $got"
}

# wait_for SECONDS WHAT CMD...: until the command succeeds.
wait_for()
{
    left=$(($1 * 5)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || fail "$what did not happen in time"
        usleep 200000
    done
}

# start_stock [OPTION...]: boots stock Linux and puts the machine's id into $id.
start_stock()
{
    "$tine" start --json "$@" --kernel "$GUEST/kernel" --initrd "$GUEST/initrd" \
        --cmdline "$(cat "$GUEST/cmdline")" --memory 128 >/tmp/started || return
    cat /tmp/started
    id=$(json_ids </tmp/started | head -n 1)
    [ -n "$id" ]
}

# json_ids: every value of a member "id" in the JSON on stdin, in order, one a line.
json_ids()
{
    grep -o '"id" *: *"[^"]*"' | sed 's/.*"\([^"]*\)"$/\1/'
}
