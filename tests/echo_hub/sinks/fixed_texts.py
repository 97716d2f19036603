from __future__ import annotations

from collections.abc import Container

from echo_hub.sinks.texts import SampleText, SampleTexts


class FixedTexts(SampleTexts):
    def __init__(self, *texts: SampleText, steps: Container[int] = range(1_000)) -> None:
        self.texts = list(texts)
        self.steps = steps

    def of_step(self, step: int) -> list[SampleText]:
        return self.texts if step in self.steps else []
