"""What a source checkpoint says about text: tokenizer, chat template, and the tokens that end a sequence."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from forerun.errors import ForerunError
from forerun.tokenizer import render_chat

_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True, kw_only=True)
class SourceTokenizer:
    """Everything that an engine directory needs to turn text into tokens and back."""

    tokenizer: Tokenizer
    chat_template: str | None
    end_tokens: tuple[int, ...]
    """Ascending."""
    bos_token: str | None
    eos_token: str | None

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and, if there is a chat template, chat_template.jinja."""
        self.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_bytes(self.chat_template.encode())


def assemble(
    tokenizer: Tokenizer,
    *,
    chat_template: str | None,
    declared_ends: Iterable[int],
    bos_token: str | None,
    eos_token: str | None,
) -> SourceTokenizer:
    """Put the parts together, adding the end tokens that a checkpoint uses but does not declare.

    Besides those declared, a sequence ends with the control token that closes the assistant's turn in the
    chat template, and with the one that separates documents in pretraining: what follows it is another text.
    So SmolLM2-Instruct, which declares <|im_end|> only, also ends at <|endoftext|>.
    """
    added = tokenizer.get_added_tokens_decoder().items()
    special = {entry.content: token for token, entry in added if entry.special}
    ends = set(declared_ends) | {special[text] for text in _DOCUMENT_ENDS if text in special}
    if chat_template is not None:
        following = _text_after_answer(chat_template, bos_token=bos_token, eos_token=eos_token)
        first = tokenizer.encode(following, add_special_tokens=False).ids[:1]
        ends |= set(first) & set(special.values())
    return SourceTokenizer(
        tokenizer=tokenizer,
        chat_template=chat_template,
        end_tokens=tuple(sorted(ends)),
        bos_token=bos_token,
        eos_token=eos_token,
    )


def _text_after_answer(chat_template: str, *, bos_token: str | None, eos_token: str | None) -> str:
    answer = "FORERUN-ANSWER"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = render_chat(chat_template, turns, add_generation_prompt=False, bos_token=bos_token, eos_token=eos_token)
    except ForerunError:
        return ""  # a template that wants other messages: only the declared ends are known
    return text.rpartition(answer)[2].lstrip() if answer in text else ""
