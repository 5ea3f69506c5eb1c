# timeout: 180
# H5: a guest that ends itself ends its VMM, each way with its own reason and exit status: poweroff,
# reboot, halt and panic of stock Linux. A panic is never a success.
. "$JOB/jobs/lib.sh"
need "$tine" "$vmm" "$GUEST/kernel"
mkdir -p -m 700 "$TINE_STATE"

# ending NAME EXTRA CMD...: boots with EXTRA on the command line, runs the command in the guest, and
# notes the exit status of the VMM and the last line of its log.
ending()
{
    name=$1 extra=$2
    shift 2
    step "$name"
    "$vmm" --id "$name" --control "$TINE_STATE/$name.sock" --vsock "$TINE_STATE/$name.vsock" \
        --console "$RESULTS/$name.console" --kernel "$GUEST/kernel" --initrd "$GUEST/initrd" \
        --cmdline "$(cat "$GUEST/cmdline") $extra" --memory 128 2>"$TINE_STATE/$name.log" &
    pid=$!
    wait_for 40 "$name: boot" "$tine" exec "$name" -- true
    "$tine" exec "$name" -- "$@" >"/tmp/$name.exec" 2>&1 &
    (sleep 20 && kill -KILL "$pid") 2>/dev/null &
    status=0
    wait "$pid" || status=$?
    [ "$status" -ne 137 ] || fail "$name: the VMM runs on"
    reason=$(tail -n 1 "$TINE_STATE/$name.log")
    echo "$name: status $status, $reason"
    [ ! -e "$TINE_STATE/$name.sock" ] || fail "$name: its socket is left behind"
    echo "$status" >>/tmp/statuses
    echo "$reason" | sed "s/$name//g" >>/tmp/reasons
}

ending poweroff "" poweroff -f
ending reboot "" reboot -f
ending halt "" halt -f
ending panic "panic=1" sh -c 'echo c >/proc/sysrq-trigger'
[ "$(sort -u /tmp/reasons | wc -l)" = 4 ] || fail "two endings give the same reason"
[ "$(tail -n 1 /tmp/statuses)" != 0 ] || fail "a panic ends with status 0"
[ "$(head -n 1 /tmp/statuses)" = 0 ] || fail "a poweroff does not end with status 0"
