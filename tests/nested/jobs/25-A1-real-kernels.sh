# timeout: 240
# A1: Debian's cloud kernel (bzImage, LZ4: unpacked by the VMM) and its general kernel (bzImage, XZ: entered
# at its own 64-bit entry) both reach init under the same name, with no word about their kind; what is
# no kernel is refused by naming the formats.
. "$JOB/jobs/lib.sh"
mkdir -p -m 700 "$TINE_STATE"
cd "$TINE_STATE" || exit 1

for kernel in kernel kernel-xz; do
    step "$kernel"
    cp "$GUEST/$kernel" vmlinux
    "$vmm" --control vm.sock --console console --kernel vmlinux --initrd "$GUEST/initrd" \
        --cmdline "$(cat "$GUEST/cmdline")" --memory 256 2>vm.log &
    pid=$!
    wait_for 60 "init under $kernel" grep -q tine-agent console
    kill "$pid"
    wait "$pid"
    rm console
done

: >empty
dd if=/dev/zero of=zeros bs=1M count=1 2>/dev/null
cat "$JOB/jobs/lib.sh" >text
for file in empty zeros text; do
    mv "$file" vmlinux
    expect_status "$file as a kernel" 1 "$vmm" --control vm.sock --kernel vmlinux 2>refusal
    cat refusal
    grep -q -i bzimage refusal && grep -q -i elf refusal || fail "$file: the formats are not named"
    [ ! -e vm.sock ] || fail "$file: a socket is left behind"
done
step "done"
