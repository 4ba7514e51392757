"""Made-up personal data to plant: 40 each of five kinds, no two alike."""

import random


def planted_values() -> list[str]:
    dice = random.Random(8)
    makers = (_email, _phone, _iban, _card, _key)
    return [maker(dice, number) for number in range(40) for maker in makers]


def _digits(dice: random.Random, count: int) -> str:
    return "".join(dice.choices("0123456789", k=count))


def _email(dice: random.Random, number: int) -> str:
    return f"{dice.choice(('anna', 'boris', 'carla'))}.{dice.choice(('schmidt', 'lopez'))}{number}@example.org"


def _phone(dice: random.Random, number: int) -> str:
    return f"+49 30 9{number:02d}{_digits(dice, 4)}"


def _iban(dice: random.Random, number: int) -> str:
    account = f"37040044{_digits(dice, 8)}{number:02d}"
    check = 98 - int(f"{account}131400") % 97
    text = f"DE{check:02d}{account}"
    return " ".join(text[place : place + 4] for place in range(0, len(text), 4))


def _card(dice: random.Random, number: int) -> str:
    digits = [4, *map(int, f"{_digits(dice, 12)}{number:02d}")]
    doubled = [2 * digit if place % 2 == 0 else digit for place, digit in enumerate(digits)]
    total = sum(digit - 9 if digit > 9 else digit for digit in doubled)
    text = "".join(map(str, [*digits, -total % 10]))
    return " ".join(text[place : place + 4] for place in range(0, 16, 4))


def _key(dice: random.Random, number: int) -> str:
    return "AKIA" + "".join(dice.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", k=16))
