"""The draws of augmentation: the same for any number of ranks and after a kill, and distributed as they should be."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modelwright.core.config import ConfigError
from modelwright.objectives.image_batches import Augmented, ImageAugmentation, ImageAugmentationConfig
from modelwright.ops.image_augment import soft_target

SIDE, NUM_CLASSES = 8, 4
EVERYTHING = {
    "crop_padding": 2, "flip": True, "mixup_alpha": 0.4, "cutmix_alpha": 1.0,
}  # fmt: skip
NUMBERS = [11, 4, 7, 30, 2, 9, 5, 21]


def image(number: int) -> Tensor:
    return torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(number))


def augmentation(step: int = 3, *, seed: int = 1, smoothing: float = 0.1, **changes: Any) -> ImageAugmentation:
    return ImageAugmentation(
        config=ImageAugmentationConfig(**changes), seed=seed, step=step, num_classes=NUM_CLASSES, smoothing=smoothing,
        image=image, label=lambda number: number % NUM_CLASSES,
    )  # fmt: skip


def joined(parts: Sequence[Augmented]) -> Augmented:
    return Augmented(torch.cat([one.images_BCSS for one in parts]), torch.cat([one.targets_BK for one in parts]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_makes_the_same_batch(ranks: int) -> None:
    augment, share = augmentation(**EVERYTHING), len(NUMBERS) // ranks
    whole = augment(NUMBERS, NUMBERS)
    parts = joined([augment(NUMBERS[first : first + share], NUMBERS) for first in range(0, len(NUMBERS), share)])
    assert torch.equal(whole.images_BCSS, parts.images_BCSS)
    assert torch.equal(whole.targets_BK, parts.targets_BK)


def test_the_draws_follow_from_seed_step_and_image_alone() -> None:
    first = augmentation(**EVERYTHING)(NUMBERS, NUMBERS)
    again = augmentation(**EVERYTHING)(NUMBERS[::-1], sorted(NUMBERS))
    assert torch.equal(first.images_BCSS, again.images_BCSS.flip(0))
    for other in (augmentation(4, **EVERYTHING), augmentation(seed=2, **EVERYTHING)):
        found = other(NUMBERS, NUMBERS)
        assert all(not torch.equal(*pair) for pair in zip(first.images_BCSS, found.images_BCSS, strict=True))


def test_a_setting_does_not_change_what_is_drawn_for_another() -> None:
    plain, mixing = augmentation(crop_padding=2), augmentation(crop_padding=2, mixup_alpha=0.4)
    assert all(torch.equal(plain.changed(number), mixing.changed(number)) for number in NUMBERS)


def test_without_settings_images_and_labels_stay() -> None:
    found = augmentation(smoothing=0.0)(NUMBERS, NUMBERS)
    assert torch.equal(found.images_BCSS, torch.stack([image(number) for number in NUMBERS]))
    assert found.targets_BK.argmax(1).tolist() == [number % NUM_CLASSES for number in NUMBERS]
    assert found.targets_BK.amax(1).eq(1).all()


def test_mixup_mixes_images_and_labels_by_the_same_share() -> None:
    augment = augmentation(mixup_alpha=0.7, smoothing=0.1)
    found, partners = augment(NUMBERS, NUMBERS), augment.partners(NUMBERS)
    assert sorted(partners.values()) == sorted(NUMBERS)
    for place, number in enumerate(NUMBERS):
        one, other = image(number).double(), image(partners[number]).double()
        mixed = found.images_BCSS[place].double()
        if number == partners[number]:
            torch.testing.assert_close(mixed, one, atol=1e-6, rtol=0)
            continue
        share = float(((mixed - other) * (one - other)).sum() / (one - other).square().sum())
        assert 0 <= share <= 1
        torch.testing.assert_close(mixed, share * one + (1 - share) * other, atol=1e-6, rtol=0)
        targets = [soft_target(NUM_CLASSES, at % NUM_CLASSES, smoothing=0.1) for at in (number, partners[number])]
        expected = share * targets[0] + (1 - share) * targets[1]
        torch.testing.assert_close(found.targets_BK[place], expected, atol=1e-6, rtol=0)


def test_cutmix_counts_the_pixels_that_it_left() -> None:
    augment = augmentation(cutmix_alpha=1.0, smoothing=0.0)
    partners = augment.partners(NUMBERS)
    for place, number in enumerate(NUMBERS):
        found = augment(NUMBERS, NUMBERS)
        own = (found.images_BCSS[place] == image(number)).all(0)
        theirs = (found.images_BCSS[place] == image(partners[number])).all(0)
        assert (own | theirs).all()
        if number % NUM_CLASSES != partners[number] % NUM_CLASSES:
            assert float(found.targets_BK[place, number % NUM_CLASSES]) == pytest.approx(float(own.double().mean()))


def test_shares_are_drawn_from_the_beta_distribution() -> None:
    """Mean and variance of Beta(alpha, alpha) are 1/2 and 1 / (4 (2 alpha + 1)); within four standard errors."""
    alpha, numbers = 0.5, list(range(0, 2 * 600, 2))
    augment = ImageAugmentation(
        config=ImageAugmentationConfig(mixup_alpha=alpha), seed=0, step=0, num_classes=1200, smoothing=0.0,
        image=lambda number: torch.zeros(3, 1, 1), label=lambda number: number,
    )  # fmt: skip
    found, partners = augment(numbers, numbers), augment.partners(numbers)
    shares = np.array([float(found.targets_BK[place, n]) for place, n in enumerate(numbers) if partners[n] != n])
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(shares.mean() - 0.5) < 4 * (variance / len(shares)) ** 0.5
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_both_kinds_of_mixing_share_the_images() -> None:
    """Where MixUp acts, a pixel is neither that of the image nor of its partner."""
    augment = augmentation(mixup_alpha=5.0, cutmix_alpha=5.0)
    numbers = list(range(100))
    found, partners = augment(numbers, numbers), augment.partners(numbers)
    is_cut = [
        bool(((found.images_BCSS[n] == image(n)) | (found.images_BCSS[n] == image(partners[n]))).all())
        for n in numbers
        if partners[n] != n
    ]
    assert 0.3 < np.mean(is_cut) < 0.7


@pytest.mark.parametrize("name", ["crop_padding", "mixup_alpha", "cutmix_alpha"])
def test_settings_that_cannot_be_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ImageAugmentationConfig(**{name: -1})
