"""Audits of texts: words from tables, tokens from spans and from rows."""

import pytest
import torch
from torch import nn

import dadplug

CRITERION = nn.CrossEntropyLoss()
WORDS, WIDTH, LENGTH = 500, 48, 6


class Reader(nn.Module):
    """Embedding with positions, a linear layer at each position, and a mean."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, input_ids):
        vectors = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]).expand_as(input_ids))
        return self.last(torch.tanh(self.first(nn.functional.layer_norm(vectors, (WIDTH,)))).mean(1))


@pytest.fixture
def texts():
    torch.manual_seed(0)
    return {"input_ids": torch.randint(0, WORDS, (3, LENGTH))}, torch.tensor([0, 1, 2])


def audit(texts, mode, **options):
    torch.manual_seed(1)
    given = {"remedies": False, "progress": False, "seconds": 30.0} | options
    return dadplug.audit(Reader(), CRITERION, *texts, mode, attacks=("words", "tokens"), **given)


@pytest.mark.parametrize(
    ("mode", "options"), [("dsgd", {}), ("dad", {}), ("rankdad", {"rank": 40, "wire": "fp32"})], ids=str
)
def test_tokens_are_recovered(texts, mode, options):
    report = audit(texts, mode, **options)
    tokens = next(result for result in report.results if result.attack == "tokens")
    assert tokens.similarity == 1.0
    assert tokens.measure == "token accuracy"
    assert report.recovered == 1.0
    words = [result for result in report.results if result.attack == "words"]
    assert [result.layer for result in words] == ["words.weight"]  # positions are the same in all texts
    assert words[0].similarity == 1.0
    assert words[0].chance < 0.1


def test_few_components_hide_positions_but_no_words(texts):
    report = audit(texts, "rankdad", rank=1)
    found = {result.attack: result for result in report.results}
    assert found["tokens"].similarity < 0.5
    assert found["words"].similarity == 1.0
    assert report.recovered == 0.0
    assert "row numbers of tables" in report.verdict
