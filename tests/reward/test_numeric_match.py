"""Numbers in answers, with the cases on which graders of GSM8K and MATH are known to differ or to fail."""

import time
from fractions import Fraction

import pytest

from modelwright.reward.numeric_match import NumericMatchConfig, last_boxed, last_number, numbers_in
from refusals import config_error
from reward_samples import sample

EQUAL = [
    ("72", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"),
    ("The answer is 72.", "72"),
    ("#### 1,234", "1234"),
    ("#### $1,234.50", "1234.5"),
    ("#### 72 clips, not 73", "72"),
    ("#### -5", "-5"),
    ("\u22125", "-5"),
    ("So 10-3 = 7", "7"),
    ("It is 5-3", "3"),
    ("**18**", "18"),
    ("18.00", "18"),
    (".5", "0.5"),
    ("$\\frac{3}{4}$", "0.75"),
    ("$\\boxed{\\dfrac{3}{4}}$", "3/4"),
    ("\\boxed{\\frac34}", "\\frac{3}{4}"),
    ("\\boxed{-\\frac{1}{2}}", "-0.5"),
    ("\\boxed{\\frac{-1}{2}}", "-1/2"),
    ("\\boxed{1\\frac{1}{2}}", "1.5"),
    ("3 1/2", "3.5"),
    ("\\boxed{10{,}000}", "10000"),
    ("\\boxed{10,\\!000}", "10,000"),
    ("\\boxed{10\\,000}", "10000"),
    ("\\boxed{10 000}", "10000"),
    ("1,00,000", "100000"),
    ("\\boxed{x = 5}", "5"),
    ("\\boxed{5\\text{ cm}^2}", "5"),
    ("\\boxed{45^\\circ}", "45"),
    ("\\boxed{45^{\\circ}}", "45"),
    ("\\boxed{\\text{12}}", "12"),
    ("\\boxed{\\$18.90}", "18.9"),
    ("\\fbox{7}", "7"),
    ("so $\\boxed 7$.", "7"),
    ("first \\boxed{6}, no: \\boxed{7}", "7"),
    ("\\boxed{7} because 8 is more", "7"),
    ("25%", "25"),
    ("25\\%", "0.25"),
    ("0.25", "25%"),
    ("100 percent", "1"),
    ("3 \\times 10^{5}", "300000"),
    ("3e5", "300000"),
    ("2.5*10^-3", "0.0025"),
    ("10^6", "1000000"),
    ("Total: 1 000 000 people", "1000000"),
    ("-1 000 000", "-1000000"),
    ("12\u202f000", "12000"),
    ("\uff11\uff12", "12"),
]
DIFFERENT = [
    ("3,14", "3.14"),  # docs/rewards.md says so
    ("42 (see step 3)", "42"),
    ("in 12 300 came", "12300"),
    ("73", "72"),
    ("0.33", "1/3"),
    ("1/0", "1"),
    ("", "0"),
    ("no number", "0"),
    ("\\boxed{5, 7}", "7"),
    ("\\boxed{}", "7"),
    ("7 and \\boxed{8", "7"),
    ("\\boxed{10^2}", "2"),
    ("1e999999999", "1"),
    ("9" * 1000, "9"),
    ("-5", "5"),
    ("25%", "2500"),
]


def score(answer: str, reference: object, **options: object) -> float:
    reward = NumericMatchConfig(**options).build("numeric")  # type: ignore[arg-type]
    (result,) = reward.score([sample(answer, answer=reference)])
    assert not result.failed, result
    return result.value


def test_equal_numbers() -> None:
    assert [pair for pair in EQUAL if score(*pair) != 1.0] == []


def test_different_numbers() -> None:
    assert [pair for pair in DIFFERENT if score(*pair) != 0.0] == []


def test_the_place_of_the_number() -> None:
    text = "It is 5. \\boxed{6}\n#### 7\nor 8"
    places = {"boxed": "6", "marker": "7", "last": "8", "any": "6"}
    assert {place: score(text, number, number_in=place) for place, number in places.items()} == dict.fromkeys(places, 1)
    assert [score("It is 5", "5", number_in=place) for place in ("boxed", "marker", "last", "any")] == [0, 0, 1, 1]


def test_tolerance_is_relative() -> None:
    assert score("0.333", "1/3", tolerance=1e-2) == 1.0
    assert score("1001", "1000", tolerance=1e-3) == 1.0
    assert score("1002", "1000", tolerance=1e-3) == 0.0
    assert score("0.0001", "0", tolerance=1e-3) == 1.0
    with config_error("tolerance", match="tolerance: must be from 0 to less than 1"):
        NumericMatchConfig(tolerance=1.0)


def test_a_reference_may_be_a_number_or_have_alternatives() -> None:
    assert score("7", 7) == score("7.5", 7.5) == score("2", ["1", "2"]) == 1.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "no_reference"), ({"answer": ""}, "no_reference"), ({"answer": None}, "no_reference"),
     ({"answer": True}, "no_reference"), ({"answer": "many"}, "reference_not_numeric")],
)  # fmt: skip
def test_a_record_without_a_number_is_a_failure(fields: dict[str, object], reason: str) -> None:
    (result,) = NumericMatchConfig().build("numeric").score([sample("7", **{"other": 1, **fields})])
    assert (result.failed, result.outcome) == (True, reason)
    assert "'answer'" in result.detail


def test_numbers_are_exact() -> None:
    text = "0.1 and 1e400 and 12345678901234567890.12345678901234567890 and 1e401"
    last = Fraction("12345678901234567890.12345678901234567890")
    assert [number.value for number in numbers_in(text)] == [Fraction(1, 10), Fraction(10) ** 400, last]


@pytest.mark.parametrize(
    "piece", ["1", "1,", "1,11", " ", "1 ", "1/", "\\frac", "\\frac{1}{", "-", "{", "\\boxed{", "10^", "1\\times ", "."]
)
def test_long_answers_take_linear_time(piece: str) -> None:
    """Twice the text may take four times as long, and a busy machine ten times; a bad pattern takes thousands."""
    text = piece * (16_000 // len(piece))
    began = time.process_time()
    last_number(text), last_boxed(text)
    assert time.process_time() - began < 5
