"""A linear-chain CRF as a torch module, and a BiLSTM tagger trained with it.

    $ pip install ".[torch]" && python examples/crf.py
    epoch  1: loss 7.125
    ...
    epoch 15: loss 0.003
    tags right in new sentences: 99.9%

Copy `CRF`. Its loss is that of pytorch-crf; the model and the data below it are only an example.
"""

from __future__ import annotations

import torch

import arraylogchain as alc


class CRF(torch.nn.Module):
    """Scores of pairs of neighboring tags, and of the first and the last tag.

    `scores` [n, T, K] come from a network. `mask` [n, T] is True for words and False for padding,
    which follows the words. Tags of padding are ignored.
    """

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        self.transitions = torch.nn.Parameter(torch.empty(num_tags, num_tags))  # [from, to]
        self.start = torch.nn.Parameter(torch.empty(num_tags))
        self.end = torch.nn.Parameter(torch.empty(num_tags))
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.1, 0.1)

    def chain(self, scores: torch.Tensor, mask: torch.Tensor) -> alc.LogChain:
        """Return the chain of the tags."""
        return alc.LogChain(
            scores,
            log_transitions=self.transitions,
            log_initial=self.start,
            log_final=self.end,
            lengths=mask.sum(-1),
        )

    def forward(self, scores: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the loss: the negative log-likelihood of the tags, averaged over sentences."""
        chain = self.chain(scores, mask)
        return -chain.log_probability(tags.where(mask, -1)).mean()

    @torch.no_grad()
    def decode(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the best tags of each sentence, -1 past its end."""
        return self.chain(scores, mask).viterbi().states


class Tagger(torch.nn.Module):
    """An embedding, a BiLSTM, and a score for each word and tag."""

    def __init__(self, num_words: int, num_tags: int, size: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(num_words, size)
        self.lstm = torch.nn.LSTM(size, size // 2, bidirectional=True, batch_first=True)
        self.linear = torch.nn.Linear(size, num_tags)
        self.crf = CRF(num_tags)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return scores [n, T, K]."""
        return self.linear(self.lstm(self.embedding(words))[0])


def draw(num_sentences: int, num_words: int, longest: int = 20) -> tuple[torch.Tensor, ...]:
    """Return words, tags (O, B, I) and mask of sentences in which one or two I follow each B.

    Words of the upper half of the vocabulary are names; only their order distinguishes B from I.
    """
    tags = torch.zeros(num_sentences, longest, dtype=torch.int64)
    for row in tags:
        for start in range(int(torch.randint(0, 4, ())), longest - 3, 6):
            row[start : start + 2 + int(torch.randint(0, 2, ()))] = 2
            row[start] = 1
    words = torch.randint(0, num_words // 2, tags.shape) + (tags > 0) * (num_words // 2)
    mask = torch.arange(longest) < torch.randint(5, longest + 1, (num_sentences, 1))
    return words, tags, mask


def main(num_sentences: int = 256, epochs: int = 15) -> float:
    """Train a tagger; return its accuracy on new sentences."""
    torch.manual_seed(0)
    words, tags, mask = draw(num_sentences, num_words=50)
    tagger = Tagger(num_words=50, num_tags=3)
    optimizer = torch.optim.Adam(tagger.parameters(), lr=0.02)
    for epoch in range(epochs):
        for batch in torch.randperm(num_sentences).split(32):
            loss = tagger.crf(tagger(words[batch]), tags[batch], mask[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1:2}: loss {loss.item():.3f}")
    words, tags, mask = draw(100, num_words=50)
    result = tagger.crf.decode(tagger(words), mask)
    right = (result == tags)[mask].float().mean().item()
    print(f"tags right in new sentences: {right:.1%}")
    return right


if __name__ == "__main__":
    main()
