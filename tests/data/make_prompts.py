"""Writes prompts.json: prompts with the greedy continuations that transformers computes in float32.

    python tests/data/make_prompts.py

Every kept prompt has a gap of more than ``MIN_GAP`` between the two best logits at each of its steps, so that rounding
cannot decide a token, and reaches no end of sequence. Candidates that fail this are listed and left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridattn.models.locate import resolve

MODEL, NEW_TOKENS, MIN_GAP = "smollm2-135m", 16, 1e-2
OUT = Path(__file__).parent / "prompts.json"

STORY = (
    "The lighthouse keeper woke before the sun, as he had done every morning for thirty years. He climbed the one "
    "hundred and twelve steps to the lamp room, wiped the salt from the windows and wrote the weather into his book. "
    "There was little wind that day. Far out a grey ship stood almost still, and he could not tell which way it was "
    "going. He drank his coffee and waited. At noon the ship had not moved. "
)
REPORT = (
    "A cache keeps copies of data close to the place where they are needed. When the processor asks for an address, "
    "the cache looks for it; if the copy is there, the answer takes a few cycles, and if it is not, the request "
    "travels on to the next level, which is larger and slower. What makes this work is that programs ask for the same"
    " data again soon, and for data next to it. What makes it fail is a stride that jumps over every line, a table "
    "larger than the cache, or two threads that write to the same line and take it from each other again and again. "
    "The cure for the first is another order of the loops, for the second a smaller tile, and for the third some "
    "padding. None of the three can be found by reading the source code alone: one has to count the misses. "
)
RECIPE = (
    "To make bread for two days, take a pound of flour, a spoon of salt, a little yeast and as much warm water as the "
    "flour will drink. Mix everything in a bowl and leave it under a cloth until it has doubled. Fold it three times, "
    "let it rest once more, and put it into a hot oven with a cup of water beside it. After forty minutes knock on the "
    "bottom: if it sounds hollow, the bread is done. "
)
CODE = '''class Stack:
    """A last-in, first-out list."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return'''

CANDIDATES = {
    "one_token_hello": "Hello",
    "one_token_the": "The",
    "one_token_import": "import",
    "two_tokens": "Good morning",
    "capital": "The capital of France is",
    "capital_list": "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "water": "Water boils at a temperature of",
    "sky": "The sky is blue because",
    "count": "1, 2, 3, 4, 5, 6,",
    "alphabet": "a b c d e f g h i j k",
    "days": "Monday, Tuesday, Wednesday,",
    "months": "January, February, March, April,",
    "shopping_list": "Shopping list:\n- milk\n- eggs\n- bread\n- butter\n- apples\n-",
    "numbered_list": "Three rules of the workshop:\n1. Wear gloves.\n2. Clean your bench.\n3.",
    "markdown_table": "| city | country |\n|---|---|\n| Oslo | Norway |\n| Lisbon | Portugal |\n| Athens |",
    "python_factorial": "def factorial(n):\n    if n == 0:\n        return 1\n    return",
    "python_loop": "for i in range(10):\n    print(",
    "python_class": CODE,
    "c_main": '#include <stdio.h>\n\nint main(void) {\n    printf("Hello, world!\\n");\n    return',
    "json": '{"name": "Anna", "age": 31, "city": "Bergen"}\n{"name": "Jonas", "age": 28, "city":',
    "html": "<ul>\n  <li>apple</li>\n  <li>pear</li>\n  <li>",
    "sql": "SELECT name, price FROM fruit WHERE price < 3 ORDER BY",
    "german": "Guten Morgen! Heute scheint die Sonne, und wir gehen in den Garten. Dort",
    "german_umlauts": "Die Bäume blühen, und über den Dächern hört man die Vögel. Der Frühling ist schön,",
    "french": "Il était une fois un roi qui vivait dans un château près de la forêt. Un jour,",
    "spanish": "El niño comió una manzana y después bebió un vaso de agua. Mañana",
    "italian": "La città è bella e il caffè è buono. Perché",
    "portuguese": "A canção não é longa, mas o coração",
    "polish": "Warszawa jest stolicą Polski. Żółw idzie powoli, a",
    "russian": "Москва — столица России. Париж — столица",
    "greek": "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας. Η Ρώμη είναι",
    "chinese": "北京是中国的首都。巴黎是",
    "japanese": "私は学生です。毎日、日本語を勉強します。",
    "korean": "안녕하세요. 저는 학생입니다. 저는",
    "arabic": "القاهرة هي عاصمة مصر. باريس هي",
    "hindi": "भारत की राजधानी दिल्ली है।",
    "emoji": "🙂 means happy, 😢 means sad, 🎉 means",
    "accents_and_symbols": "Prices: 5 €, 7 £, 9 ¥ — naïve café, 20 °C, ½ litre, x² + y² =",
    "chat": "<|im_start|>user\nWhat is the largest planet?<|im_end|>\n<|im_start|>assistant\n",
    "dialogue": '"Where have you been?" she asked.\n"At the harbour," he said. "I wanted to see the ships."\n"',
    "repetition": "the cat sat on the mat. " * 8,
    "story": STORY,
    "story_twice": STORY + STORY + "Then",
    "report": REPORT,
    "recipe": RECIPE,
    "recipe_and_report": RECIPE + REPORT + "The baker said that",
    "all_three": STORY + RECIPE + REPORT + "In short,",
    "long_600": STORY + RECIPE + REPORT + STORY + RECIPE + REPORT[:330] + "This is why the lighthouse keeper",
}


def continuation(model: Any, ids: list[int]) -> tuple[list[int], float]:
    """The greedy continuation of ``ids`` and the smallest gap between the two best logits of its steps."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main() -> None:
    folder = resolve(MODEL).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kept = []
    for name, text in CANDIDATES.items():
        ids = tokenizer(text)["input_ids"]
        tokens, gap = continuation(model, ids)
        ends = model.config.eos_token_id in tokens
        note = "" if gap > MIN_GAP and not ends else "  left out"
        print(f"{name:24} {len(ids):4} tokens, gap {gap:8.5f}{', ends' if ends else ''}{note}", file=sys.stderr)
        if not note:
            kept.append(
                {"name": name, "text": text, "num_tokens": len(ids), "token_ids": tokens, "min_gap": round(gap, 6)}
            )
    content = {"model": MODEL, "dtype": "fp32", "new_tokens": NEW_TOKENS, "min_gap": MIN_GAP, "prompts": kept}
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kept)} of {len(CANDIDATES)} prompts kept in {OUT}", file=sys.stderr)


if __name__ == "__main__":
    main()
