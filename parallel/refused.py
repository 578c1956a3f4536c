"""The exception of a command line that cannot run."""


class Refused(Exception):
    """Nothing can be started; `sentences` says why, one rule each."""

    def __init__(self, sentences: list[str]):
        super().__init__("\n".join(sentences))
        self.sentences = sentences
