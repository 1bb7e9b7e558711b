"""Codes of strings and their hashes."""

from __future__ import annotations

import hashlib
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.evaluator.library import READY, Evaluator, compiled, string_hash
from tests.evaluator.versions import STRINGS, random_version
from tests.examples import examples

texts = st.one_of(st.sampled_from(STRINGS), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))


@given(st.binary(max_size=600))
@examples(100, long=2000)
def test_the_hash_is_blake2b(data: bytes) -> None:
    assert string_hash(data) == int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def test_the_hash_of_whole_blocks_is_blake2b() -> None:
    for length in (0, 1, 127, 128, 129, 255, 256, 257):
        data = bytes(range(256))[:length] + bytes(max(0, length - 256))
        assert string_hash(data) == int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@given(st.randoms(use_true_random=False), st.lists(texts, max_size=20))
@examples(50, long=500)
def test_codes_and_what_is_unknown_are_those_of_the_predictor(rnd: Random, strings: list[str]) -> None:
    version = random_version(rnd, {"type": "boosted"})
    status, image, _ = compiled(version.stored)
    assert status == READY
    evaluator = Evaluator(image)
    for category in range(len(version.preprocessing.categories)):
        codes = version.preprocessing.codes(category, strings)
        unknown = version.preprocessing.unknown(category, codes)
        found = [evaluator.code(category, text) for text in strings]
        assert found == list(zip(codes, unknown, strict=True))
    evaluator.close()
