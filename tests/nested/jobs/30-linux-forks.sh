# timeout: 300
# Debian's stock kernel goes boot -> exec -> snapshot -> restore -> exec -> fork 4 -> exec in each ->
# fork of a fork -> exec, and every copy is a machine of its own while the one it came from goes on.
. "$JOB/jobs/lib.sh"

machine_exec()
{
    id=$1
    shift
    "$tine" exec "$id" -- "$@"
}

# note_identity ID: what must differ between any two machines.
note_identity()
{
    machine_exec "$1" sh -c 'cat /proc/sys/kernel/random/uuid; hostname; cat /etc/machine-id' \
        >"/tmp/identity.$1" || fail "identity of $1: exec failed"
    [ "$(wc -l <"/tmp/identity.$1")" = 3 ] || fail "identity of $1: $(cat "/tmp/identity.$1")"
}

# mark ID: writes its own text to a place that all copies share the name of.
mark()
{
    expect "write in $1" "" machine_exec "$1" sh -c "echo $1 >>/tmp/mark"
}

step "boot"
start_stock || fail "start: status $?"
first=$id
step "exec"
expect "kernel of the guest" "$(cat "$GUEST/version" 2>/dev/null || uname -r)" \
    machine_exec "$first" uname -r
expect "host name" tine machine_exec "$first" hostname
expect_status "exit status" 7 machine_exec "$first" sh -c 'exit 7'
expect_status "death by a signal" 137 machine_exec "$first" sh -c 'kill -9 $$'
expect "stdin and stdout" "4" sh -c "printf 'abc\n' | '$tine' exec '$first' -- wc -c"
mark "$first"

step "snapshot"
"$tine" snapshot --json "$first" /tmp/image || fail "snapshot: status $?"
du -sk /tmp/image
mark "$first"
step "kill the first machine"
expect_status "kill" 0 "$tine" kill "$first"

step "restore"
"$tine" restore --json /tmp/image >/tmp/restored || fail "restore: status $?"
cat /tmp/restored
restored=$(json_ids </tmp/restored | head -n 1)
[ -n "$restored" ] || fail "restore printed no id"
step "exec in the restored machine"
expect "what the image holds" "$first" machine_exec "$restored" cat /tmp/mark
mark "$restored"
note_identity "$restored"

step "fork 4"
"$tine" fork --json -n 4 "$restored" >/tmp/forked || fail "fork: status $?"
cat /tmp/forked
children=$(sed 's/.*"children"//' /tmp/forked | json_ids)
[ "$(echo "$children" | wc -w)" = 4 ] || fail "fork printed these children: $children"
step "exec in each"
for child in $children; do
    expect "what $child inherited" "$first
$restored" machine_exec "$child" cat /tmp/mark
    mark "$child"
    note_identity "$child"
done
expect "the parent kept its own" "$first
$restored" machine_exec "$restored" cat /tmp/mark
for child in $children; do
    expect "$child kept its own" "$first
$restored
$child" machine_exec "$child" cat /tmp/mark
done

step "fork of a fork"
child=$(echo "$children" | head -n 1)
"$tine" fork --json -n 1 "$child" >/tmp/forked || fail "fork of a fork: status $?"
cat /tmp/forked
grandchild=$(sed 's/.*"children"//' /tmp/forked | json_ids)
[ "$(echo "$grandchild" | wc -w)" = 1 ] || fail "fork printed these children: $grandchild"
step "exec in it"
mark "$grandchild"
note_identity "$grandchild"
expect "the grandchild's own" "$first
$restored
$child
$grandchild" machine_exec "$grandchild" cat /tmp/mark
expect "its parent kept its own" "$first
$restored
$child" machine_exec "$child" cat /tmp/mark
# The clock of the newest copy is the clock out here.
apart=$(($(machine_exec "$grandchild" date +%s) - $(date +%s)))
[ "$apart" -ge -2 ] && [ "$apart" -le 2 ] || fail "the grandchild's clock is $apart s apart"

step "identities"
# Nothing in one list of identities stands in another.
twice=$(cat /tmp/identity.* | sort | uniq -d)
[ -z "$twice" ] || fail "two machines share: $twice"

step "kill all"
for machine in $restored $children $grandchild; do
    "$tine" kill "$machine" || fail "kill $machine: status $?"
done
wait_for 20 "the end of all machines" sh -c '! pidof tine-vmm'
left=$(find "$TINE_STATE" -name '*.sock' -o -name '*.vsock*')
[ -z "$left" ] || fail "sockets left behind: $left"
step "done"
