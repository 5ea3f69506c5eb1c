# timeout: 300
# E21: 20 restores of one snapshot at once, then 20 forks of one machine in one pause, an exec in each;
# then a chain of forks, each of the one before it.
. "$JOB/jobs/lib.sh"

step "boot"
start_stock --name first || fail "start: status $?"
"$tine" snapshot first /tmp/image || fail "snapshot: status $?"
step "20 restores"
for i in $(seq 20); do
    "$tine" restore /tmp/image --name "r$i" >"/tmp/restore.$i" 2>&1 || echo "r$i: $?" >>/tmp/failed &
done
wait
[ ! -e /tmp/failed ] || fail "$(cat /tmp/failed /tmp/restore.*)"
for i in $(seq 20); do
    expect "exec in r$i" "r$i" "$tine" exec "r$i" -- hostname
    "$tine" kill "r$i" || fail "kill r$i: status $?"
done
step "20 forks"
"$tine" fork -n 20 first >/tmp/forked || fail "fork: status $?"
for i in $(seq 20); do
    expect "exec in first-$i" "first-$i" "$tine" exec "first-$i" -- hostname
done
expect "the parent goes on" tine "$tine" exec first -- hostname
step "a chain of forks"
machine=first
for _ in 1 2 3 4 5 6; do
    next=$("$tine" fork --json "$machine" | sed 's/.*"children"//' | json_ids)
    [ -n "$next" ] || fail "fork of $machine printed no child"
    expect "exec in $next" "$next" "$tine" exec "$next" -- hostname
    machine=$next
done
"$tine" kill --all || fail "kill --all: status $?"
[ -z "$(ls "$TINE_STATE")" ] || fail "left behind: $(ls "$TINE_STATE")"
step "done"
