"""Keys of `pg-tensile top`, through a pseudo-terminal."""

from __future__ import annotations

import os
import signal
import termios

import pytest

from pg_tensile.tools.top.keys import END, RESIZE, SUSPEND, keyboard, parse


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"qy", ["q", "y"]),
        (b"\x1b[A\x1bOB\x1b[5~\x1b[6~", ["up", "down", "page up", "page down"]),
        (b"\x1b[H\x1b[4~\r\n\x7f", ["home", "last", "enter", "enter", "back"]),
        (b"\x1b", ["escape"]),
        (b"\x1bq", ["escape", "q"]),
        (b"\x1b[1;5Cq", ["\x1b[1;5C", "q"]),
        ("é漢".encode(), ["é", "漢"]),
        (b"\xff\xfeq", ["q"]),
    ],
)
def test_keys_are_parsed(data, keys):
    assert parse(data) == keys


@pytest.fixture
def terminal():
    """Both ends of a pseudo-terminal, as files."""
    master, slave = os.openpty()
    with os.fdopen(master, "r+b", buffering=0) as keys, os.fdopen(slave, "r+b", buffering=0) as screen:
        yield keys, screen


def is_cbreak(fd):
    return not termios.tcgetattr(fd)[3] & (termios.ICANON | termios.ECHO)


def test_keys_come_one_by_one_and_the_terminal_gets_its_mode_back(terminal):
    master, slave = terminal
    before = termios.tcgetattr(slave)
    with pytest.raises(ZeroDivisionError), keyboard(slave.fileno()) as keys:
        assert is_cbreak(slave)
        assert keys.wait(0) == []
        master.write(b"j")
        assert keys.wait(5) == ["j"]
        master.write(b"\x1b[A")
        assert keys.wait(5) == ["up"]
        raise ZeroDivisionError
    assert termios.tcgetattr(slave) == before


def test_signals_come_as_keys_and_handlers_are_put_back(terminal):
    _, slave = terminal
    numbers = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with keyboard(slave.fileno()) as keys:
        for number, event in ((signal.SIGWINCH, RESIZE), (signal.SIGTSTP, SUSPEND)):
            os.kill(os.getpid(), number)
            assert keys.wait(5) == [event]
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_told_to_end_leaves_the_terminal_as_it_was(terminal, number):
    _, slave = terminal
    before = termios.tcgetattr(slave)
    with pytest.raises(SystemExit) as ended, keyboard(slave.fileno()) as keys:
        os.kill(os.getpid(), number)
        keys.wait(5)
    assert ended.value.code == 128 + number
    assert termios.tcgetattr(slave) == before


def test_a_terminal_that_is_gone_ends_it(terminal):
    master, slave = terminal
    with keyboard(slave.fileno()) as keys:
        master.close()
        assert keys.wait(5) == [END]
