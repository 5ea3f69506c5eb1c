# timeout: 300
# smp: 2
# A machine of two vCPUs with a worker on each: in a fork and in a restored copy both workers go on.
. "$JOB/jobs/lib.sh"

step "boot"
start_stock --cpus 2 || fail "start: status $?"
first=$id
expect "CPUs" 2 "$tine" exec "$first" -- nproc
"$tine" exec "$first" -- sh -c 'for cpu in 0 1; do
    taskset -c $cpu sh -c "while :; do n=\$((n + 1)); echo \$n >/tmp/count.$cpu; sleep 0.05; done" \
        >/dev/null 2>&1 &
    done'

# both_count MACHINE: waits until both workers of it have moved.
both_count()
{
    step "workers of $1"
    expect "workers of $1" "moved" "$tine" exec "$1" -- sh -c '
        for cpu in 0 1; do
            was=$(cat /tmp/count.$cpu); tries=0
            while [ "$(cat /tmp/count.$cpu)" = "$was" ]; do
                tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1; sleep 0.2
            done
        done; echo moved'
}

both_count "$first"
step "fork"
child=$("$tine" fork --json "$first" | sed 's/.*"children"//' | json_ids)
[ -n "$child" ] || fail "fork printed no child"
step "snapshot"
"$tine" snapshot "$first" /tmp/image || fail "snapshot: status $?"
step "restore"
restored=$("$tine" restore --json /tmp/image | json_ids | head -n 1)
[ -n "$restored" ] || fail "restore printed no id"
for machine in $first $child $restored; do
    both_count "$machine"
done
"$tine" kill --all || fail "kill --all: status $?"
step "done"
