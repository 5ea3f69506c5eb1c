# timeout: 240
# E9 and E10 on stock Linux: what a copy does first shows the time out here, though its snapshot is old,
# and random bytes, a UUID, a host name and a machine-id that no other copy has.
. "$JOB/jobs/lib.sh"

# look MACHINE: its first act, and whether its clock is within a second of ours.
look()
{
    before=$(date +%s)
    "$tine" exec "$1" -- sh -c 'date +%s; head -c 32 /dev/urandom | xxd -p -c 32
        cat /proc/sys/kernel/random/uuid; hostname; cat /etc/machine-id' >"/tmp/look.$1" ||
        fail "first act of $1: status $?"
    after=$(date +%s)
    now=$(head -n 1 "/tmp/look.$1")
    [ "$now" -ge $((before - 1)) ] && [ "$now" -le $((after + 1)) ] ||
        fail "$1 says $now, it is between $before and $after"
    [ "$(wc -l <"/tmp/look.$1")" = 5 ] || fail "$1: $(cat "/tmp/look.$1")"
    tail -n +2 "/tmp/look.$1" >>/tmp/identities
}

step "boot"
start_stock || fail "start: status $?"
"$tine" snapshot "$id" /tmp/image || fail "snapshot: status $?"
step "20 s later: 2 restores"
sleep 20
for name in old-1 old-2; do
    "$tine" restore --name "$name" /tmp/image || fail "restore: status $?"
    look "$name"
done
step "8 forks"
children=$("$tine" fork --json -n 8 old-1 | sed 's/.*"children"//' | json_ids)
[ "$(echo "$children" | wc -w)" = 8 ] || fail "fork printed these children: $children"
for child in $children; do
    look "$child"
done
twice=$(sort /tmp/identities | uniq -d)
[ -z "$twice" ] || fail "two machines share: $twice"
[ "$(wc -l </tmp/identities)" = 40 ] || fail "not all looked: $(cat /tmp/identities)"
step "done"
