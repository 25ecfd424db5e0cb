"""The shipped text is the one that SOURCES.md describes."""

import hashlib
import math

import pytest

from everstep.catalog import texts
from everstep.errors import ConfigError


def test_the_shipped_text_has_the_hash_that_its_source_note_states():
    path = texts.path("kjv")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest in (path.parent / "SOURCES.md").read_text()


def test_the_shipped_text_is_about_a_megabyte_of_plain_ascii():
    data = texts.path("kjv").read_bytes()
    assert 900_000 < len(data) < 1_100_000
    assert max(data) < 128


def test_a_text_that_is_not_there_is_refused_with_the_ones_that_are():
    with pytest.raises(ConfigError, match="there are: kjv"):
        texts.path("kjb")


def test_unigram_entropy_of_equally_frequent_bytes_is_the_logarithm_of_their_number():
    assert texts.unigram_entropy(bytes(range(256)) * 3) == pytest.approx(math.log(256))
    assert texts.unigram_entropy(b"aaaa") == pytest.approx(0.0)


def test_an_empty_text_has_no_entropy():
    with pytest.raises(ValueError, match="empty"):
        texts.unigram_entropy(b"")
