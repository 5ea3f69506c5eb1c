"""Snapshot, restore and fork by the command line."""

from concurrent.futures import ThreadPoolExecutor

from lib import test

MANY = 20


@test
def E21_many_restores_at_once(place):
    place.programs.make_guest(place.env)
    with ThreadPoolExecutor(MANY) as pool:
        list(pool.map(lambda i: place.linux(f"r{i}"), range(MANY)))
        names = list(pool.map(lambda i: place.tine("exec", f"r{i}", "--", "cat", "/etc/hostname").stdout,
                              range(MANY)))
    assert names == [f"r{i}\n".encode() for i in range(MANY)], names
    place.tine("kill", "--all")
    assert place.files() == [], place.files()


@test
def E21_many_forks_at_once(place):
    place.linux("a")
    place.tine("exec", "a", "--", "sh", "-c", "echo parent >/tmp/who")
    with ThreadPoolExecutor(MANY) as pool:
        forks = list(pool.map(lambda _: place.json("fork", "a"), range(MANY)))
        ids = [f["children"][0]["id"] for f in forks]
        assert len(set(ids)) == MANY, ids

        def differ(name):  # in the shell alone: a new process costs an interpreted kernel 0.1 s
            return place.tine("exec", name, "--", "sh", "-c",
                              "read w </tmp/who; echo $w; read w </proc/sys/kernel/hostname; echo $w >/tmp/who; "
                              "read w </tmp/who; echo $w").stdout
        outputs = list(pool.map(differ, ids))
    assert outputs == [f"parent\n{i}\n".encode() for i in ids], outputs
    assert place.tine("exec", "a", "--", "cat", "/tmp/who").stdout == b"parent\n"
    place.tine("kill", "--all")
    assert place.files() == [], place.files()


@test
def fork_cuts_all_children_in_one_pause_and_tells_the_times(place):
    place.linux("a")
    answer = place.json("fork", "-n", 4, "a")
    assert [c["id"] for c in answer["children"]] == ["a-1", "a-2", "a-3", "a-4"], answer
    for member in ("pause_us", "save_us", "fork_us", "total_us"):
        assert answer["timings"][member] >= 0, answer
    for child in answer["children"]:
        assert child["timings"]["renew_us"] > 0, child
    seen = {place.tine("exec", c["id"], "--", "sh", "-c",
                       "hostname; head -c 16 /dev/urandom | od -An -tx1; cat /etc/machine-id").stdout
            for c in answer["children"]}
    assert len(seen) == 4, seen
    named = place.json("fork", "--names", "left,right", "a")
    assert [c["id"] for c in named["children"]] == ["left", "right"]
    grand = place.json("fork", "left")
    assert grand["children"][0]["id"] == "left-1"
    tree = place.json("tree")["machines"]
    assert [n["id"] for n in tree] == ["a"], tree
    left = next(n for n in tree[0]["children"] if n["id"] == "left")
    assert [n["id"] for n in left["children"]] == ["left-1"], tree
    # A parent that ends leaves its children.
    place.tine("kill", "a")
    assert place.tine("exec", "left-1", "--", "hostname").stdout == b"left-1\n"
    assert b"which is gone" in place.tine("tree").stdout


@test
def a_new_machine_of_an_old_name_is_not_taken_for_the_parent(place):
    place.bare("a")
    assert [c["id"] for c in place.json("fork", "a")["children"]] == ["a-1"]
    place.tine("kill", "a")
    place.bare("a")
    assert [c["id"] for c in place.json("fork", "-n", 2, "a")["children"]] == ["a-2", "a-3"]
    tree = {n["id"]: [c["id"] for c in n["children"]] for n in place.json("tree")["machines"]}
    assert tree == {"a": ["a-2", "a-3"], "a-1": []}, tree


@test
def snapshot_and_restore_keep_what_was_written(place):
    place.linux("a")
    place.tine("exec", "a", "--", "sh", "-c", "echo kept >/tmp/f")
    place.tine("snapshot", "a", "image", cwd=place.work)  # relative to us, not to the VMM
    assert place.tine("exec", "a", "--", "cat", "/tmp/f").stdout == b"kept\n"
    place.json("restore", place.work / "image", "--name", "b")
    assert place.tine("exec", "b", "--", "cat", "/tmp/f", "/etc/hostname").stdout == b"kept\nb\n"
    again = place.tine("snapshot", "b", place.work / "image")  # replaces the one it runs from
    assert again.returncode == 0
    place.tine("exec", "b", "--", "cat", "/tmp/f")
    done = place.tine("run", "--image", place.work / "image", "--", "cat", "/tmp/f")
    assert done.stdout == b"kept\n", done


@test
def E18_a_fork_that_cannot_be_leaves_the_parent_running(place):
    place.linux("a")
    place.linux("taken")
    done = place.tine("fork", "--names", "x,taken", "a", check=False)
    assert done.returncode != 0 and b"taken" in done.stderr, done
    done = place.tine("snapshot", "a", "/proc/none", check=False)
    assert done.returncode != 0, done
    assert place.json("status", "a")["state"] == "running"
    assert place.tine("exec", "a", "--", "echo", "on").stdout == b"on\n"
    assert [m["id"] for m in place.json("ps")["machines"]] == ["a", "taken"]
