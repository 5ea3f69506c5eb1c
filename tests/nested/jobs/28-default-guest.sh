# timeout: 180
# With nothing but a command named, tine finds out which guest runs on this KVM (the stock one), makes
# its image once and restores it from then on; doctor says the same.
. "$JOB/jobs/lib.sh"
export TINE_GUESTS=/tmp/guests TINE_CACHE=/tmp/cache
mkdir "$TINE_GUESTS"
ln -s "$GUEST" "$TINE_GUESTS/stock"

step "doctor"
"$tine" doctor --json >/tmp/doctor || fail "doctor: status $?: $(cat /tmp/doctor)"
grep -q '"guest":"stock"' /tmp/doctor || fail "doctor: $(cat /tmp/doctor)"
grep -q '"kernel_mode":"hardware"' /tmp/doctor || fail "doctor: $(cat /tmp/doctor)"
step "first run"
expect "kernel of the default guest" "$(uname -r)" "$tine" run -- uname -r
step "second run"
expect_status "status of the command" 3 "$tine" run -- sh -c 'exit 3'
images=$(find "$TINE_CACHE" -name manifest.json | wc -l)
[ "$images" = 1 ] || fail "two runs made $images images"
step "through a pipe"
expect "bytes through a pipe" "$(head -c 100000 "$vmm" | sha256sum)" \
    sh -c "head -c 100000 '$vmm' | '$tine' run -- sha256sum"
[ -z "$(ls "$TINE_STATE")" ] || fail "left behind: $(ls "$TINE_STATE")"
step "done"
