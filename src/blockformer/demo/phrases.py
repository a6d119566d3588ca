"""English number and date phrases and their Chinese, made by rule: a translation task whose answers code can check."""

import calendar
import hashlib
import random
from collections.abc import Iterator

DIGITS = "零一二三四五六七八九"
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
MONTHS = "January February March April May June July August September October November December".split()
LARGEST = 9_999_999


def english_number(number: int) -> str:
    """305 -> "three hundred and five"; 0 to 9,999,999."""
    if number < 20:
        return ONES[number]
    if number < 100:
        rest = number % 10
        return TENS[number // 10] + (f"-{ONES[rest]}" if rest else "")
    for size, name in ((1_000_000, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            head, rest = divmod(number, size)
            text = f"{english_number(head)} {name}"
            if not rest:
                return text
            return f"{text} {'and ' if rest < 100 else ''}{english_number(rest)}"
    raise AssertionError(number)


def chinese_number(number: int) -> str:
    """305 -> "三百零五"; 0 to 9,999,999. Ten is 十, without a one before it, only at the very beginning."""
    if number >= 10_000:
        head, rest = divmod(number, 10_000)
        text = chinese_number(head) + "万"
        if not rest:
            return text
        return text + ("零" if rest < 1000 else "") + _below_ten_thousand(rest)
    text = _below_ten_thousand(number)
    return text.removeprefix("一") if 10 <= number < 20 else text


def _below_ten_thousand(number: int) -> str:
    if number < 10:
        return DIGITS[number]
    text, gap = "", False
    for size, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // size % 10
        if digit:
            text += ("零" if gap and text else "") + DIGITS[digit] + name
        gap = not digit
    return text


def ordinal(day: int) -> str:
    """5 -> "5th"."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{day}{'th' if 10 < day < 14 else endings.get(day % 10, 'th')}"


def random_number(random_state: random.Random) -> int:
    """A number of one to seven digits, of which few, some or most are zero: zeros are the hard part."""
    share = random_state.choice((0.0, 0.4, 0.7))
    digits = (random_state.random() >= share and random_state.randrange(10) for _ in str(LARGEST))
    number = int("".join(str(int(digit)) for digit in digits))
    return number % 10 ** random_state.randint(1, len(str(LARGEST)))


def random_pair(random_state: random.Random) -> tuple[str, str]:
    """One phrase and its translation: a number of random size, or a date in one of two English forms."""
    if random_state.random() < 0.7:
        number = random_number(random_state)
        return english_number(number), chinese_number(number)
    year, month = random_state.randint(1800, 2199), random_state.randint(1, 12)
    day = random_state.randint(1, calendar.monthrange(year, month)[1])
    name = MONTHS[month - 1]
    source = random_state.choice((f"{name} {ordinal(day)}, {year}", f"{day} {name} {year}"))
    return source, f"{year}年{month}月{day}日"


def pairs(count: int, seed: int = 0, held_out: bool = False) -> list[tuple[str, str]]:
    """Distinct pairs. The answer decides whether a pair is held out, so that no answer is on both sides.

    Args:
        count: how many.
        seed: of the random phrases.
        held_out: give pairs of the held-out tenth instead of the rest.
    """
    found: dict[str, str] = {}
    for source, target in _stream(seed):
        is_held_out = hashlib.sha256(target.encode()).digest()[0] % 10 == 0
        if is_held_out == held_out:
            found[source] = target
            if len(found) == count:
                return list(found.items())
    raise AssertionError


def _stream(seed: int) -> Iterator[tuple[str, str]]:
    random_state = random.Random(seed)  # nosec B311 # texts to learn from, no secrets
    while True:
        yield random_pair(random_state)
