# Shell shared by the scripts of this project; source it, do not run it.
#
# Progress goes to stderr, one line at a time, with the seconds since the script began. Results go
# to stdout. Everything that is fetched or built lives in one cache folder, and a finished entry of
# it appears there in one rename: what has its final name is complete.

[ -n "${BASH_VERSION:-}" ] || { echo "lib.sh needs bash" >&2; exit 2; }

TINE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TINE_CACHE=${TINE_CACHE:-$HOME/.cache/tine}
LIB_PROGRAM=${0##*/}

note() {
    printf '[%4ds] %s: %s\n' "$SECONDS" "$LIB_PROGRAM" "$*" >&2
}

die() {
    printf '%s: %s\n' "$LIB_PROGRAM" "$*" >&2
    exit 1
}

# step LABEL COMMAND...: run quietly; speak up after 2 s and then every 15 s; on failure show the
# end of what the command wrote and return its status.
step() {
    local label=$1 log begin=$SECONDS next=2 status=0 child
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/tine-step.XXXXXX")
    "$@" >"$log" 2>&1 </dev/null &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        if ((SECONDS - begin >= next)); then
            note "$label ($((SECONDS - begin)) s so far)"
            next=$((SECONDS - begin + 15))
        fi
        sleep 0.1
    done
    wait "$child" || status=$?
    if ((status != 0)); then
        note "$label: failed with status $status; its last lines:"
        tail -n 25 "$log" | sed 's/^/    /' >&2
    elif ((SECONDS - begin >= 2)); then
        note "$label: done in $((SECONDS - begin)) s"
    fi
    rm -f "$log"
    return "$status"
}

# as_root COMMAND...: for the package manager only; nothing else in this project needs root.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -n "$@" || sudo "$@"
    else
        die "need root for: $* (no sudo here; run that as root once)"
    fi
}

# packages_wanted: the names in packages.txt, one a line.
packages_wanted() {
    sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' "$TINE_ROOT/packages.txt"
}

# packages_missing NAME...: those that dpkg does not have installed.
packages_missing() {
    local have
    # dpkg-query fails when it knows none of a name; what it does know is still printed.
    have=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "$@" 2>/dev/null || true)
    printf '%s\n' "$@" | grep -vxF -f <(sed -n 's/^ii *//p' <<<"$have"; echo) || true
}

# packages_install [NAME...]: make sure these Debian packages are there; all of packages.txt when
# none is named. Asks the network for nothing when nothing is missing.
packages_install() {
    local -a wanted missing
    command -v dpkg-query >/dev/null || die "this needs Debian 12 (no dpkg-query here)"
    if (($# > 0)); then
        wanted=("$@")
    else
        mapfile -t wanted < <(packages_wanted)
    fi
    mapfile -t missing < <(packages_missing "${wanted[@]}")
    ((${#missing[@]} > 0)) || return 0

    local -a apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=600)
    note "installing ${#missing[@]} Debian packages: ${missing[*]}"
    # Fresh machines have no package lists and old lists name files that are gone: try, then update.
    if packages_known "${missing[@]}" &&
        step "apt-get install" as_root "${apt[@]}" install --no-install-recommends "${missing[@]}"; then
        return 0
    fi
    step "apt-get update" as_root "${apt[@]}" update || die "apt-get update failed"
    step "apt-get install" as_root "${apt[@]}" install --no-install-recommends "${missing[@]}" ||
        die "could not install: ${missing[*]}"
}

# packages_known NAME...: whether the package lists name a version of each.
packages_known() {
    local name
    for name; do
        [ -n "$(apt-cache show --no-all-versions "$name" 2>/dev/null)" ] || return 1
    done
}

# package_version NAME: the version apt would install now; updates the lists when it knows none.
package_version() {
    local version
    version=$(apt-cache show --no-all-versions "$1" 2>/dev/null | sed -n 's/^Version: //p')
    if [ -z "$version" ]; then
        step "apt-get update" as_root apt-get -q -y update || return 1
        version=$(apt-cache show --no-all-versions "$1" | sed -n 's/^Version: //p')
    fi
    [ -n "$version" ] || return 1
    printf '%s\n' "$version"
}

# package_fetch NAME VERSION: the path of that .deb in the cache, downloaded when it is not there.
package_fetch() {
    local name=$1 version=$2 folder=$TINE_CACHE/debs part found
    found=$(package_file "$folder" "$name" "$version")
    if [ -z "$found" ]; then
        mkdir -p "$folder"
        part=$(mktemp -d "$folder/.part.XXXXXX")
        chmod 755 "$part"
        if ! (cd "$part" && step "download $name $version" apt-get -q download "$name=$version"); then
            rm -rf "$part"
            return 1
        fi
        mv "$part"/*.deb "$folder/"
        rm -rf "$part"
        found=$(package_file "$folder" "$name" "$version")
    fi
    [ -n "$found" ] || return 1
    printf '%s\n' "$found"
}

# package_file FOLDER NAME VERSION: apt writes the colon of an epoch as %3a.
package_file() {
    find "$1" -maxdepth 1 -name "$2_${3//:/%3a}_*.deb" -print -quit 2>/dev/null || true
}

# content_key [ARGUMENT|-f FILE]...: 16 hex digits over strings and file contents, in order.
content_key() {
    {
        while (($# > 0)); do
            if [ "$1" = -f ]; then
                sha256sum <"$2" || return 1
                shift 2
            else
                printf '%s\0' "$1"
                shift
            fi
        done
    } | sha256sum | cut -c 1-16
}

# lock_take NAME: hold the named lock of the cache until this shell ends. Says so when it waits.
lock_take() {
    local fd
    mkdir -p "$TINE_CACHE/locks"
    exec {fd}>"$TINE_CACHE/locks/$1"
    if ! flock -n "$fd"; then
        note "another process is at work on $1; waiting for it"
        flock "$fd"
    fi
}

# pinned NAME COMMAND...: what COMMAND printed the first time it was asked; asks again if $update is 1.
pinned() {
    local file=$TINE_CACHE/versions/$1 value
    shift
    if [ "${update:-0}" = 0 ] && [ -s "$file" ]; then
        cat "$file"
        return
    fi
    value=$("$@") || return 1
    mkdir -p "$TINE_CACHE/versions"
    printf '%s\n' "$value" >"$file.$$"
    mv "$file.$$" "$file"
    printf '%s\n' "$value"
}

# publish WORK FINAL: the only way into the cache. Contents reach the disk before the name does.
publish() {
    chmod 755 "$1"
    sync -f "$1"
    if ! mv -T "$1" "$2" 2>/dev/null; then
        [ -d "$2" ] || die "cannot rename $1 to $2"
        rm -rf "$1"
    fi
}

# work_folder NAME: a fresh folder beside the final ones, removed when this script ends early.
work_folder() {
    # What a kill -9 left behind long ago.
    find "$TINE_CACHE" -maxdepth 1 -name '.work-*' -mmin +720 -exec rm -rf {} +
    work=$(mktemp -d "$TINE_CACHE/.work-$1.XXXXXX")
    trap 'rm -rf "$work"' EXIT
}

# debian_kernel META: "NAME VERSION" of the kernel package that Debian's META package stands for, as
# settled the first time.
debian_kernel() {
    pinned "$1" debian_kernel_resolve "$1"
}

debian_kernel_resolve() {
    local name
    package_version "$1" >/dev/null || return 1
    name=$(apt-cache depends "$1" | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1)
    [ -n "$name" ] || return 1
    printf '%s %s\n' "$name" "$(package_version "$name")"
}
