"""Commands in the default guest, by `tine run` and `tine exec`."""

import os
import signal
import time

from lib import patience, test, wait_until


@test
def run_passes_output_status_and_input(place):
    place.programs.make_guest(place.env)
    done = place.tine("run", "--", "sh", "-c", "cat; echo err >&2; exit 7", stdin=b"in\0\xff",
                      check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"in\0\xff", b"err\n"), done
    assert place.files() == []


@test
def exec_tells_code_signal_and_failed_start_apart(place):
    place.linux("a")
    for command, status in ((["sh", "-c", ":"], 0), (["sh", "-c", "exit 9"], 9), (["sh", "-c", "exit 255"], 255),
                            (["sh", "-c", "kill -9 $$"], 137), (["sh", "-c", "kill -15 $$"], 143),
                            (["/no/such"], 127), (["/etc/hostname"], 126)):
        done = place.tine("exec", "a", "--", *command, check=False)
        assert done.returncode == status, f"{command}: {done}"
    assert place.tine("exec", "a", "--cwd", "/none", "--", "true", check=False).returncode == 126
    assert place.tine("exec", "a", "--timeout", "0.3", "--", "sleep", "60",
                      check=False).returncode == 124
    j = place.json("exec", "a", "--", "sh", "-c", "printf '\\377'; echo e >&2; kill -9 $$", check=False)
    assert (j["exit_code"], j["signal"], j["stdout"], j["stdout_encoding"], j["stderr"]) == \
        (None, 9, "/w==", "base64", "e\n"), j


@test
def A8_arguments_and_environment_arrive_unchanged(place):
    place.linux("a")
    long = "x" * 100000
    done = place.tine("exec", "a", "-e", "A=x loglevel=7 init=/bin/sh", "--", "sh", "-c",
                      'printf "%s|" "$A" "$@"', "sh", "a b", "$HOME", "x'y", "", "\n", long)
    assert done.stdout == ("x loglevel=7 init=/bin/sh|a b|$HOME|x'y||\n|" + long + "|").encode(), done
    assert b"init=/bin/sh" not in place.tine("exec", "a", "--", "cat", "/proc/cmdline").stdout
    # Our options end where the command begins.
    assert place.tine("exec", "a", "echo", "-t", "--json").stdout == b"-t --json\n"


@test
def nothing_of_our_environment_is_inherited(place):
    place.linux("a")
    done = place.tine("exec", "a", "--", "cat", "/proc/self/environ",
                      env={"TINE_SECRET": "s3cret"})
    names = {entry.split(b"=")[0] for entry in done.stdout.split(b"\0") if entry}
    # GLIBC_TUNABLES is the lean guest's own, from its kernel command line.
    assert names - {b"GLIBC_TUNABLES"} == {b"PATH", b"HOME"}, names


@test
def signals_are_passed_on(place):
    place.linux("a")
    run = place.begin([place.programs.tine, "exec", "a", "--", "sh", "-c",
                       "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done"])
    assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=60)
    assert (run.returncode, out) == (3, b"caught\n"), (run.returncode, out)


@test
def a_client_that_vanishes_takes_its_command_along(place):
    place.linux("a")
    run = place.begin([place.programs.tine, "exec", "a", "--", "sh", "-c", "echo on; exec sleep 1000"])
    assert run.stdout.readline() == b"on\n"
    run.kill()
    wait_until("the command is gone",
               lambda: b"sleep 1000" not in place.tine("exec", "a", "--", "ps").stdout, 30)


@test
def exec_in_a_machine_that_cannot_says_why(place):
    done = place.tine("exec", "none", "--", "true", check=False)
    assert done.returncode == 125 and b"no machine none" in done.stderr, done
    place.bare("bare")
    begin = time.monotonic()
    done = place.tine("exec", "bare", "--", "true", check=False)
    assert done.returncode == 125 and b"bare" in done.stderr and b"booting" in done.stderr, done
    assert time.monotonic() - begin < 8 * patience()
    place.linux("a")
    place.tine("pause", "a")
    begin = time.monotonic()
    done = place.tine("exec", "a", "--", "true", check=False)
    assert done.returncode == 125 and b"paused" in done.stderr, done
    assert time.monotonic() - begin < 2 * patience()
    place.tine("resume", "a")
    assert place.tine("exec", "a", "--", "echo", "on").stdout == b"on\n"


@test
def a_terminal_is_a_terminal(place):
    place.linux("a")
    pid, fd = os.forkpty()
    if pid == 0:
        os.execve(place.programs.tine, ["tine", "exec", "-t", "a", "--", "sh", "-c", "tty; echo $TERM"],
                  dict(place.env, TERM="vt100"))
    text = b""
    try:
        while chunk := os.read(fd, 1000):
            text += chunk
    except OSError:
        pass  # the way a terminal says end of file
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(fd)
    assert b"/dev/pts/" in text and b"vt100" in text, text
