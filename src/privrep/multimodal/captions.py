"""Scores of generated captions and answers against what people wrote. Not private: computed on data.

BLEU, ROUGE-L and CIDEr (the -D form, as on the COCO server) are computed by pycocoevalcap; METEOR is the jar that comes
with it. The tokenizer (Stanford's PTB) and METEOR need Java. Without it captions are cut into lower-case words without
punctuation, which can move figures in the third place, and METEOR is left out. What is left out is None, with a reason.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from privrep.errors import InputError

INSTALL = "pip install pycocoevalcap"
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_NO_JAVA = "METEOR runs on Java; install a Java runtime."
_NO_SPICE = (
    "SPICE needs the models of Stanford CoreNLP 3.6.0, which come with no package; put stanford-corenlp-3.6.0.jar and "
    "stanford-corenlp-3.6.0-models.jar into the folder {}."
)
Lines = dict[str, list[str]]  # tokens, joined by spaces, by image


@dataclass(frozen=True)
class CaptionScores:
    """Scores of a corpus: 0 to 1, but for CIDEr, 0 to 10; None where `missing` has the reason."""

    bleu: tuple[float, float, float, float]  # BLEU-1 to BLEU-4
    rouge_l: float
    cider: float  # idf is of these references: 0 for a single image
    meteor: float | None
    spice: float | None
    tokenizer: str
    missing: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        bleu = ", ".join(f"BLEU-{n} {score:.3f}" for n, score in enumerate(self.bleu, 1))
        meteor, spice = ("none" if score is None else f"{score:.3f}" for score in (self.meteor, self.spice))
        line = f"{bleu}, ROUGE-L {self.rouge_l:.3f}, CIDEr {self.cider:.3f}, METEOR {meteor}, SPICE {spice}"
        return "\n".join([f"{line} (tokens: {self.tokenizer})", *self.missing.values()])


def caption_scores(
    references: Mapping[Hashable, Sequence[str]], generated: Mapping[Hashable, str], meteor: bool = True
) -> CaptionScores:
    """Return scores of one generated caption per image against its references.

    Args:
        references: captions that people wrote, at least one for each image.
        generated: one caption for each image, by the same keys.
        meteor: whether to run METEOR, which takes ten seconds to start.
    """
    _check(references, generated)
    tool = _import_tool("pycocoevalcap", "eval captions")
    java = shutil.which("java") is not None
    texts = {str(n): list(references[key]) for n, key in enumerate(references)}
    said = {str(n): [generated[key]] for n, key in enumerate(references)}
    people, machine = (_cut_tokens(tool, lines) if java else _cut_words(lines) for lines in (texts, said))
    if not any(line for lines in people.values() for line in lines):
        raise InputError("the references hold no word at all; give captions that people wrote.")
    score, missing = _score_in_python(people, machine), dict[str, str]()
    score["meteor"] = _run_meteor(tool, people, machine) if meteor and java else None
    if score["meteor"] is None:
        missing["meteor"] = _NO_JAVA if meteor else "METEOR was not asked for."
    score["spice"], reason = (
        _run_spice(tool, people, machine) if java else (None, "SPICE runs on Java, which is not here.")
    )
    if reason:
        missing["spice"] = reason
    return CaptionScores(**score, tokenizer="PTB" if java else "words", missing=missing)


def _check(references: Mapping[Hashable, Sequence[str]], generated: Mapping[Hashable, str]) -> None:
    """Raise InputError unless every image has references and a generated caption."""
    if not references:
        raise InputError("there are no images to score; give at least one with its references.")
    if set(references) != set(generated):
        odd = sorted(map(str, set(references) ^ set(generated)))[0]
        raise InputError(f"image {odd} has references or a generated caption, but not both; give both for each image.")
    for key, captions in references.items():
        if isinstance(captions, str) or not captions or not all(isinstance(caption, str) for caption in captions):
            raise InputError(f"the references of image {key} must be a list of at least one text.")
        if not isinstance(generated[key], str):
            raise InputError(f"the generated caption of image {key} must be one text.")


def _import_tool(name: str, purpose: str) -> Any:
    """Import a package; raise InputError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(f"to {purpose} a package is missing; install it with: {INSTALL}") from error


def _find_folder(tool: Any, name: str) -> Path:
    """Return the path of a folder within a package."""
    return Path(next(iter(tool.__path__))) / name


def _cut_words(texts: Lines) -> Lines:
    """Return each text as lower-case words without punctuation, joined by spaces."""
    return {key: [" ".join(_WORD.findall(text.lower())) for text in lines] for key, lines in texts.items()}


def _cut_tokens(tool: Any, texts: Lines) -> Lines:
    """Return tokens of Stanford's tokenizer, in lower case, without punctuation, as the COCO server cuts captions."""
    punctuation = set(import_module("pycocoevalcap.tokenizer.ptbtokenizer").PUNCTUATIONS)
    flat = [" ".join(text.split()) for lines in texts.values() for text in lines]
    program = ("-cp", "stanford-corenlp-3.4.1.jar", "edu.stanford.nlp.process.PTBTokenizer")
    found = subprocess.run(
        ["java", *program, "-preserveLines", "-lowerCase", "-encoding", "UTF-8"],
        cwd=_find_folder(tool, "tokenizer"),
        input="".join(f"{line}\n" for line in flat),
        capture_output=True,
        encoding="utf-8",
    )
    cut = found.stdout.split("\n")[:-1]
    if found.returncode or len(cut) != len(flat):
        raise InputError(f"the tokenizer of pycocoevalcap failed; check Java. It said: {found.stderr.strip()[-200:]}")
    tokens = iter(" ".join(token for token in line.split() if token not in punctuation) for line in cut)
    return {key: [next(tokens) for _ in lines] for key, lines in texts.items()}


def _score_in_python(people: Lines, machine: Lines) -> dict[str, Any]:
    """Return BLEU, ROUGE-L and CIDEr, which need no Java.

    Args:
        people: the references' tokens, by image.
        machine: the generated caption's tokens, by image.
    """
    bleu = import_module("pycocoevalcap.bleu.bleu").Bleu(4).compute_score(people, machine, verbose=0)[0]
    rouge = import_module("pycocoevalcap.rouge.rouge").Rouge().compute_score(people, machine)[0]
    cider = import_module("pycocoevalcap.cider.cider").Cider().compute_score(people, machine)[0]
    return {"bleu": tuple(map(float, bleu)), "rouge_l": float(rouge), "cider": float(cider)}


def _run_meteor(tool: Any, people: Lines, machine: Lines, *options: str) -> float:
    """Return METEOR 1.5 for English: the statistics of every image, then the score of all of them together.

    Args:
        tool: the package pycocoevalcap.
        people: the references' tokens, by image.
        machine: the generated caption's tokens, by image.
        options: further arguments of the jar.
    """
    command = ["java", "-Xmx2G", "-jar", "meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-norm", *options]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        with subprocess.Popen(command, cwd=_find_folder(tool, "meteor"), encoding="utf-8", **pipes) as jar:
            asked, answers = _check_pipe(jar.stdin), _check_pipe(jar.stdout)
            counts = []
            for key in people:
                print(_join("SCORE", *people[key], *machine[key]), file=asked, flush=True)
                counts.append(answers.readline().strip())
            print(_join("EVAL", *counts), file=asked, flush=True)
            return [float(answers.readline()) for _ in range(len(counts) + 1)][-1]
    except (OSError, ValueError) as error:
        raise InputError("METEOR gave no score; check that Java can use 2 GB of memory, or leave it out.") from error


def _check_pipe(stream: IO[str] | None) -> IO[str]:
    """Return an open pipe; raise ValueError if there is none."""
    if stream is None:
        raise ValueError("no pipe")
    return stream


def _join(*parts: str) -> str:
    """Return parts as one line of METEOR's protocol."""
    return " ||| ".join(part.replace("|||", " ") for part in parts)


def _run_spice(tool: Any, people: Lines, machine: Lines) -> tuple[float | None, str]:
    """Return SPICE's score, or None and why: its models come with no package, and nothing is downloaded here.

    Args:
        tool: the package pycocoevalcap.
        people: the references' tokens, by image.
        machine: the generated caption's tokens, by image.
    """
    folder = _find_folder(tool, "spice/lib")
    if not all((folder / f"stanford-corenlp-3.6.0{part}.jar").exists() for part in ("", "-models")):
        return None, _NO_SPICE.format(folder)
    try:
        return float(import_module("pycocoevalcap.spice.spice").Spice().compute_score(people, machine)[0]), ""
    except (OSError, subprocess.CalledProcessError) as error:
        return None, f"SPICE failed ({str(error).splitlines()[0]}); it is known to run on Java 8."


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {"none": "0"} | {word: str(n) for n, word in enumerate(_DIGITS)}
_ARTICLES = {"a", "an", "the"}
_CONTRACTED = (
    "ain't aren't can't couldn't didn't doesn't don't hadn't hasn't haven't isn't mightn't mustn't needn't oughtn't "
    "shan't shouldn't wasn't weren't won't wouldn't could've might've must've should've would've they've we've you've "
    "i've i'm they'd they'll they're it'd it'll you'll you're he's how's that's there's what's when's where's who's "
    "who'll why's somebody's someone's o'clock ma'am y'all"
)
_CONTRACTIONS = {word.replace("'", ""): word for word in _CONTRACTED.split()}


def normal_answer(answer: str) -> str:
    """Return an answer as the VQA evaluation compares it.

    It is in lower case, without articles. Full stops stay as decimal points alone, commas inside numbers go, and other
    punctuation but apostrophes and colons is a space. Number words to ten are digits. Common contractions have their
    apostrophe.
    """
    text = answer.lower().replace("’", "'")
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)
    text = re.sub(r"[^\w\s'.:]|_", " ", text)
    words = (_NUMBERS.get(word, word) for word in text.split() if word not in _ARTICLES)
    return " ".join(_CONTRACTIONS.get(word, word) for word in words)


def exact_match(answers: Sequence[str], truths: Sequence[str]) -> float:
    """Return the share of answers that equal the truth, both as `normal_answer` makes them."""
    _check_lengths(answers, truths)
    return sum(map(_is_equal, answers, truths)) / len(answers)


def vqa_score(answers: Sequence[str], humans: Sequence[Sequence[str]]) -> float:
    """Return the mean of min(1, how many people gave this answer / 3).

    All people of a question count. The challenge's server averages over leaving one of ten out, which gives slightly
    less where one to three agree.

    Args:
        answers: one for each question.
        humans: the answers that people gave to each question.
    """
    _check_lengths(answers, humans)
    if any(isinstance(said, str) or not said for said in humans):
        raise InputError("each question needs a list of the answers that people gave; one is empty or a single text.")
    agreeing = (sum(_is_equal(answer, one) for one in said) for answer, said in zip(answers, humans, strict=True))
    return sum(min(1.0, people / 3) for people in agreeing) / len(answers)


def _is_equal(answer: str, truth: str) -> bool:
    """Return whether two answers are the same to the VQA evaluation."""
    return normal_answer(answer) == normal_answer(truth)


def _check_lengths(answers: Sequence[Any], truths: Sequence[Any]) -> None:
    """Raise InputError unless there is one truth for each answer."""
    if isinstance(answers, str) or isinstance(truths, str):
        raise InputError("answers and truths must be lists of texts. Got a single text instead.")
    if not answers or len(answers) != len(truths):
        raise InputError(
            f"give one truth for each answer. Got {len(answers)} answers and {len(truths)} truths instead."
        )
