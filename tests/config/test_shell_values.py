"""A launch script is understood as a shell would, as far as that can be known without running anything."""

import contextlib
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config.importing.shell_values import commands_of
from drivetrain.config.importing.whole_numbers import whole_number
from drivetrain.errors import ConfigurationError


def words(text: str, **given_values: str) -> list[str]:
    """The words of the last command of a script."""
    commands, _ = commands_of(text, "script", given_values)
    return [word.text for word in commands[-1].words]


def missing(text: str) -> list[str]:
    """Why words of the last command are unknown."""
    commands, explain = commands_of(text, "script", {})
    return [explain(name) for word in commands[-1].words for name in word.missing]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run --a 1 \\\n  --b 2", ["run", "--a", "1", "--b", "2"]),
        ("N=3\nrun --a $N --b ${N}x --c '$N'", ["run", "--a", "3", "--b", "3x", "--c", "$N"]),
        ('A="--x 1 --y 2"\nrun $A "$A"', ["run", "--x", "1", "--y", "2", "--x 1 --y 2"]),
        ("A=(--x 1 # no\n --y '2 3')\nrun ${A[@]} end", ["run", "--x", "1", "--y", "2", "3", "end"]),
        ("A=(--x '2 3')\nrun \"${A[@]}\"", ["run", "--x", "2 3"]),
        ('A=(--x)\nA+=(--y "--z 1")\nrun ${A[*]}', ["run", "--x", "--y", "--z", "1"]),
        ('A="--x"\nA="$A --y"\nrun $A', ["run", "--x", "--y"]),
        ("run ${N:-4} ${M-5}", ["run", "4", "5"]),
        ("N=\nrun ${N:-4} x${N-5}", ["run", "4", "x"]),
        ("G=8\nN=2\nrun $(($G*N + 1)) $((7/2)) $((-7%4))", ["run", "17", "3", "-3"]),
        ("export N=3; run $N 2>&1 | tee log", ["tee", "log"]),
        ("run a > out.txt 2>/dev/null", ["run", "a"]),
        ("cat <<EOF\n--n 3 'unclosed\nEOF\nrun a", ["run", "a"]),
        ('run "a\\"b" a\\ b', ["run", 'a"b', "a b"]),
        ("cd x && run a", ["run", "a"]),
        ("A=1\ncase $A in\n 0|2) B=x ;;\n 1) B=y ;;\nesac\nrun $B", ["run", "y"]),
        ("case ab in a*) run yes ;; *) run no ;; esac", ["run", "yes"]),
        ('D=fp8\nif [[ "$D" == "fp8" ]]; then A=(--f 1); else A=(--g); fi\nrun ${A[@]}', ["run", "--f", "1"]),
        ("N=2\nif [ $N -gt 1 ] && [ $N -lt 3 ]; then M=y; elif true; then M=z; fi\nrun $M", ["run", "y"]),
        ('if [[ -z "" && ( a == b || c == c ) ]]; then M=y; fi\nrun $M', ["run", "$M"]),
        ("[ a = a ] && M=1\n[ a = b ] && M=2\nrun $M", ["run", "1"]),
        ("{ M=1; }\n( M=2 )\nrun $M", ["run", "2"]),
        ("A=(x y)\nrun $A ${A[1]}", ["run", "x", "y"]),
        ("run --a=$((2*3))", ["run", "--a=6"]),
    ],
)
def test_words_are_those_that_a_shell_would_give(script: str, expected: list[str]) -> None:
    assert words(script) == expected


def test_what_the_user_sets_goes_before_what_the_script_sets() -> None:
    assert words("N=1\nrun $N $M", N="7", M="8") == ["run", "7", "8"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run $DATA", ["$DATA (not set in the file)"]),
        ("run $1", ["$1 (an argument of the script itself)"]),
        ("run $N\nN=1\nrun $N", []),
        ("A=$N\nN=1\nrun $A", ["$N (used before line 2, which sets it)"]),
        ("run `hostname`", ["the output of the command 'hostname'"]),
        ("run $(date +%s)", ["the output of the command 'date +%s'"]),
        ("if [ -d x ]; then N=1; fi\nrun $N", ["N (the condition at line 1, which only a shell can decide)"]),
        ("for i in 1 2; do N=$i; done\nrun $N", ["N (a for loop at line 1)"]),
        ("f() { N=1; }\nrun $N", ["N (a function at line 1)"]),
        ("run ${N%%.*}", ["N"]),
    ],
)
def test_what_only_a_shell_could_tell_stays_unknown_with_its_reason(script: str, expected: list[str]) -> None:
    found = missing(script)
    assert len(found) == len(expected)
    assert all(reason in one for reason, one in zip(expected, found, strict=True))


def test_variables_that_need_each_other_are_named_in_one_message() -> None:
    with pytest.raises(ConfigurationError, match=r"\$A needs \$B needs \$A|\$B needs \$A needs \$B"):
        missing("A=$B\nB=$A\nrun $B")


def test_a_variable_that_doubles_itself_is_refused_before_it_fills_memory() -> None:
    script = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60 + "run $A"
    with pytest.raises(ConfigurationError, match="more than 1,000,000 characters"):
        words(script)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("run 'a", "line 1: a quotation that begins with ' is not closed"),
        ('x=1\nrun "a', 'line 2: a quotation that begins with " is not closed'),
        ("A=(1 2", "an array of values is not closed"),
        ("run ${A", r"\$\{ is not closed"),
        ("if true; then\nrun a", "expected fi"),
        ("run $((1", "is not closed"),
        ("${A:-" * 60 + "}" * 60, "nested more than 40 deep"),
        ("{ " * 60 + "x; " + "} " * 60, "nested more than 40 deep"),
    ],
)
def test_what_is_not_closed_or_endless_is_one_message_with_its_line(script: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        commands_of(script, "script", {})


def test_nothing_is_executed(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    text = f"A=$(touch {victim})\nB=`touch {victim}`\ntouch {victim}\nrun $A $B $(touch {victim})"
    commands_of(text, "script", {})
    assert not victim.exists()


@given(
    st.text(alphabet=st.sampled_from(list("ab1 =-$\"'\\(){}[]|&;<>#`@*\n\tif;then fi doneesac")), max_size=60)
)
def test_any_text_is_understood_or_refused_with_a_message(text: str) -> None:
    with contextlib.suppress(ConfigurationError):
        commands_of(text, "script", {})


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r")), min_size=1))
def test_quoted_words_come_back_as_they_were(wanted: list[str]) -> None:
    assert words("run " + shlex.join(wanted)) == ["run", *wanted]


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda three: f"({three[0]}{three[1]}{three[2]})"
        ),
        max_leaves=8,
    )
)
def test_arithmetic_is_that_of_whole_numbers(expression: str) -> None:
    assert whole_number(expression) == eval(expression)  # noqa: S307  digits, signs and brackets that this test made


@pytest.mark.parametrize(
    "expression", ["", "1/0", "1+", "(1", "a", "1.5", "9" * 400 + "*" + "9" * 400, "1**2"]
)
def test_what_has_no_value_has_none(expression: str) -> None:
    assert whole_number(expression) is None
