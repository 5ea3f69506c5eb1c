# timeout: 30
# The machine around the tests has a KVM that runs guest code: without it nothing below means anything.
. "$JOB/jobs/lib.sh"

[ -c /dev/kvm ] || fail "no /dev/kvm: $(dmesg | grep -i -e kvm -e svm | tail -n 3)"
expect "a bare guest" "probe: the guest computed 42" "$BIN/probe"
