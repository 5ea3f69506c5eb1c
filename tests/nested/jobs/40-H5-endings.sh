# timeout: 300
# H5: a guest that ends itself ends its VMM, each way with its own reason and exit status: poweroff,
# reboot, halt and panic of stock Linux. A panic is never a success.
. "$JOB/jobs/lib.sh"
mkdir -p -m 700 "$TINE_STATE"

# ending NAME STATUS EXTRA CMD...: boots with EXTRA on the command line, runs the command in the guest,
# and checks the exit status of the VMM and that its last line says NAME.
ending()
{
    name=$1 want=$2 extra=$3
    shift 3
    step "$name"
    "$vmm" --id vm --control "$TINE_STATE/vm.sock" --vsock "$TINE_STATE/vm.vsock" \
        --console "$RESULTS/$name.console" --kernel "$GUEST/kernel" --initrd "$GUEST/initrd" \
        --cmdline "$(cat "$GUEST/cmdline") $extra" --memory 128 2>"$TINE_STATE/$name.log" &
    pid=$!
    wait_for 90 "$name: boot" "$tine" exec vm -- true
    "$tine" exec vm -- "$@" >"$RESULTS/$name.exec" 2>&1 &
    (sleep 20 && kill -KILL "$pid") 2>/dev/null &
    watchdog=$!
    status=0
    wait "$pid" || status=$?
    kill "$watchdog" 2>/dev/null
    [ "$status" -ne 137 ] || fail "$name: the VMM runs on"
    reason=$(tail -n 1 "$TINE_STATE/$name.log")
    echo "$name: status $status, $reason"
    [ "$status" = "$want" ] || fail "$name: expected status $want, got $status"
    [ ! -e "$TINE_STATE/vm.sock" ] || fail "$name: its socket is left behind"
}

# The statuses of docs/protocol.md, section 4.
ending poweroff 0 "" poweroff -f
ending reboot 3 "" reboot -f
ending halt 7 "" halt -f
ending panic 4 "" sh -c 'echo c >/proc/sysrq-trigger'
ending panic-that-stays 4 "panic=0" sh -c 'echo c >/proc/sysrq-trigger'
ending triple-fault 5 "reboot=t" reboot -f
