# timeout: 300
# A guest that computes (floating point, a value that depends on every step) while it is snapshotted
# and forked: it and every copy finish with the same value, whoever waits for it in the parent over an
# open connection is answered, and no kernel complains of time that stood still.
. "$JOB/jobs/lib.sh"

work='BEGIN { x = 0.5; for (i = 0; i < 200000; i++) { x = 3.9 * x * (1 - x); y += x }
      printf "%.12f %.9f\n", x, y }'
step "boot"
start_stock || fail "start: status $?"
first=$id
value=$("$tine" exec "$first" -- awk "$work") || fail "awk: status $?"
step "the value is $value"

# The work goes on in the background: what an open exec runs ends with its connection, as in every copy.
"$tine" exec "$first" -- sh -c "{ awk '$work' >/tmp/v; mv /tmp/v /tmp/value; } >/dev/null 2>&1 &"
"$tine" exec "$first" -- sh -c 'until [ -e /tmp/value ]; do sleep 0.2; done; cat /tmp/value' \
    >/tmp/answer &
asked=$!
step "fork 3"
"$tine" fork --json -n 3 "$first" >/tmp/forked || fail "fork: status $?"
children=$(sed 's/.*"children"//' /tmp/forked | json_ids)
step "snapshot"
"$tine" snapshot "$first" /tmp/image || fail "snapshot: status $?"
kill -0 "$asked" || fail "the work ended before the copies were made: it is too small"
step "restore"
restored=$("$tine" restore --json /tmp/image | json_ids | head -n 1)
[ -n "$restored" ] || fail "restore printed no id"

step "wait for the answer in the parent"
status=0
wait "$asked" || status=$?
[ "$status" = 0 ] || fail "the parent's open exec ended with status $status"
[ "$(cat /tmp/answer)" = "$value" ] || fail "the parent answered '$(cat /tmp/answer)'"
for machine in $children $restored; do
    step "wait for $machine"
    wait_for 60 "the value in $machine" "$tine" exec "$machine" -- test -e /tmp/value
    expect "value in $machine" "$value" "$tine" exec "$machine" -- cat /tmp/value
done
for machine in $first $children $restored; do
    complaints=$("$tine" exec "$machine" -- sh -c \
        'dmesg | grep -i -e "soft lockup" -e "rcu.*stall" -e "marking clocksource" -e "hung" -e BUG: -e WARNING:')
    [ -z "$complaints" ] || fail "$machine: $complaints"
done
"$tine" kill --all || fail "kill --all: status $?"
step "done"
