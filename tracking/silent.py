"""What the ranks that do not log use in place of the tracker."""


class Silent:
    """Takes everything a Tracker takes and does nothing with it."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def log(self, step: int, metrics: dict[str, float], histograms: dict | None = None) -> None:
        """Nothing."""

    def evaluating(self, done: int, total: int) -> None:
        """Nothing."""

    def sample(self, prompt: str, text: str) -> None:
        """Nothing."""

    def verdict(self, sentence: str) -> None:
        """Nothing."""

    def not_finite(self, step: int, seen: str) -> None:
        """Nothing."""

    def rolled_back(self, step: int) -> None:
        """Nothing."""

    def warn(self, sentence: str) -> None:
        """Into this rank's own log."""
        print(sentence)

    def last_words(self, signum: int) -> None:
        """Nothing."""
