# timeout: 240
# B2: the stock drivers of blk and vsock are unbound (status 0) and bound again, 50 times, once with disk
# I/O running; each time the device works again, and a copy made afterwards does too.
. "$JOB/jobs/lib.sh"

dd if=/dev/urandom of=/tmp/disk bs=64k count=128 2>/dev/null
sum=$(sha256sum </tmp/disk)
step "boot"
start_stock --disk /tmp/disk || fail "start: status $?"
first=$id
expect "disk at first" "$sum" "$tine" exec "$first" -- sh -c 'sha256sum </dev/vda'

# rebind DRIVER COUNT: a program for the guest.
rebind='rebind()
{
    cd "/sys/bus/virtio/drivers/$1" || exit 1
    device=$(ls | grep "^virtio[0-9]")
    [ -n "$device" ] || exit 1
    n=0
    while [ $n -lt "$2" ]; do
        n=$((n + 1))
        echo "$device" >unbind && echo "$device" >bind || exit 1
    done
}'

step "blk, 50 times"
expect "rebinding blk" done "$tine" exec "$first" -- sh -c "$rebind; rebind virtio_blk 50; echo done"
expect "disk afterwards" "$sum" "$tine" exec "$first" -- sh -c 'sha256sum </dev/vda'
step "blk, with I/O"
# Its reads may fail while the driver is away, as those of an unplugged disk; no more than that.
"$tine" exec "$first" -- sh -c '(while [ ! -e /tmp/stop ]; do dd if=/dev/vda of=/dev/null bs=64k; done) \
    >/dev/null 2>&1 &'
expect "rebinding blk" done "$tine" exec "$first" -- sh -c "$rebind; rebind virtio_blk 10; echo done"
"$tine" exec "$first" -- touch /tmp/stop
expect "disk afterwards" "$sum" "$tine" exec "$first" -- sh -c 'sha256sum </dev/vda'

step "vsock, 50 times"
# The connection that asks for it is among those that are cut.
"$tine" exec "$first" -- sh -c "$rebind; (sleep 1; rebind vmw_vsock_virtio_transport 50; echo done) \
    </dev/null >/tmp/rebound 2>&1 &" || fail "start of the rebinding: status $?"
wait_for 60 "vsock after it was bound again" "$tine" exec "$first" -- grep -q done /tmp/rebound
expect "exec" hello "$tine" exec "$first" -- echo hello

step "fork"
child=$("$tine" fork --json "$first" | sed 's/.*"children"//' | json_ids)
[ -n "$child" ] || fail "fork printed no child"
expect "disk of the copy" "$sum" "$tine" exec "$child" -- sh -c 'sha256sum </dev/vda'
expect "rebinding blk in the copy" done \
    "$tine" exec "$child" -- sh -c "$rebind; rebind virtio_blk 5; echo done"
expect "disk of the copy" "$sum" "$tine" exec "$child" -- sh -c 'sha256sum </dev/vda'
faults=$("$tine" status --json "$first" | grep -o '"faults": *[1-9][0-9]*')
[ -z "$faults" ] || fail "a device counted faults: $("$tine" status --json "$first")"
step "done"
