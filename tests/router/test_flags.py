# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvpush_router.coordinates import Coordinates
from kvpush_router.engine import EngineSpec
from kvpush_router.flags import parse, parse_engines


def test_coordinates_belong_to_the_url_before_them() -> None:
    text = "http://a:1,engine=p0,daemon=10.0.0.1:7766,http://b:2,https://c:3,daemon=[::1]:5,engine=p2"
    assert parse_engines(text, coordinates=True) == (
        EngineSpec("http://a:1", Coordinates("p0", "10.0.0.1", 7766)),
        EngineSpec("http://b:2"),
        EngineSpec("https://c:3", Coordinates("p2", "::1", 5)),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:1", "is no URL"),
        ("", "is no URL"),
        ("engine=p0,http://a:1", "before any URL"),
        ("http://a:1,engine=p0", "no daemon=HOST:PORT"),
        ("http://a:1,daemon=h:1", "no engine=ID"),
        ("http://a:1,engine=p0,daemon=h", "is not HOST:PORT"),
        ("http://a:1,engine=p0,daemon=h:0", "is not HOST:PORT"),
        ("http://a:1,engine=p0,engine=p1,daemon=h:1", "said twice"),
        ("http://a:99999", "port is not a number"),
        ("http://:80", "no host and port"),
        ("http://a:1/v1", "leave out all that follows the port"),
    ],
)
def test_a_wrong_engine_is_named_with_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        parse_engines(text, coordinates=True)


def test_flags_may_be_repeated() -> None:
    flags = parse(
        ["--prefill", "http://a:1", "--prefill", "http://b:2", "--decode", "http://c:3", "--port", "80"]
    )
    assert [spec.url for spec in flags.prefill] == ["http://a:1", "http://b:2"]
    assert flags.port == 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--decode", "http://c:3", "--port", "80"], "--prefill"),
        (["--prefill", "http://a:1", "--decode", "http://c:3", "--port", "x"], "is not a port"),
        (["--prefill", "http://a:1,http://a:1", "--decode", "http://c:3", "--port", "1"], "named twice"),
        (
            ["--prefill", "http://a:1", "--decode", "http://c:3,engine=d", "--port", "1"],
            "only prefill engines",
        ),
    ],
)
def test_wrong_flags_exit_with_two_and_say_why(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err
