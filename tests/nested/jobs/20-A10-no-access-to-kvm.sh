# timeout: 60
# A10: no /dev/kvm, one without rights, one that is an ordinary file: each time one line with the path
# and the reason, a non-zero exit status, no core and nothing left behind.
if [ "${1:-}" != inside ]; then
    # In a mount namespace of its own, so that the jobs after this one find their /dev/kvm.
    exec unshare -m sh "$0" inside
fi
. "$JOB/jobs/lib.sh"

mount --make-rprivate /
mount -t tmpfs -o mode=755 dev /dev
mknod -m 666 /dev/null c 1 3
mknod -m 666 /dev/zero c 1 5
mknod -m 666 /dev/urandom c 1 9
mkdir -p /tmp/a10
chmod 777 /tmp/a10
cd /tmp/a10 || exit 1
echo /tmp/a10/core >/proc/sys/kernel/core_pattern
ulimit -c unlimited

# refused CASE REASON SHELL…: one start that must fail like this.
refused()
{
    name=$1 reason=$2
    shift 2
    step "$name"
    got=0
    "$@" "exec $vmm --control /tmp/a10/vm.sock --kernel $GUEST/kernel" >out 2>err || got=$?
    cat out err
    [ "$got" -ne 0 ] || fail "$name: the exit status is 0"
    [ "$got" -lt 128 ] || fail "$name: ended by signal $((got - 128))"
    [ "$(wc -l <err)" = 1 ] || fail "$name: $(wc -l <err) lines instead of one"
    grep -q /dev/kvm err || fail "$name: the line does not name /dev/kvm"
    grep -qi "$reason" err || fail "$name: the line does not say '$reason'"
    rm -f out err
    left=$(ls -A)
    [ -z "$left" ] || fail "$name: left behind: $left"
}

refused "no /dev/kvm" "no such file" sh -c
mknod -m 000 /dev/kvm c 10 232
refused "/dev/kvm without rights" "permission denied" su -s /bin/sh nobody -c
rm /dev/kvm
echo text >/dev/kvm
refused "/dev/kvm is an ordinary file" "inappropriate ioctl" sh -c
