"""What is not the same in all runs: choices, configuration, machine and versions, and which runs have which value."""

from dataclasses import dataclass

from tracking.runs import Run, flat, text, value_of

# Of result.json: what makes runs incomparable without any key of the configuration being different.
FACTS = ("device", "git_commit", "versions", "world_size", "parameters", "data")


@dataclass
class Difference:
    """A key that differs; `values` gives each value and who has it, in words."""

    key: str
    values: list[tuple[str, str]]


def differences(runs: list[Run]) -> list[Difference]:
    """Every key that has more than one value among the runs whose configuration is known."""
    known = [run for run in runs if run.cfg is not None]
    groups = {group: None for run in known for group in run.choices}
    found = []
    for key, of_run in _values(known).items():
        holders: dict[str, list[Run]] = {}
        for run in known:
            holders.setdefault(of_run.get(id(run), "–"), []).append(run)
        group, _, rest = key.partition(".")
        # An option's name is its choice once more.
        if len(holders) > 1 and not (rest == "name" and group in groups):
            by_choice = _choices(holders, group) if group in groups else None
            who = by_choice or {
                value: "#" + ranges([run.number for run in members]) for value, members in holders.items()
            }
            found.append(Difference(key, [(value, who[value]) for value in holders]))
    return found


def common(runs: list[Run]) -> dict[str, str]:
    """Every key that has the same value in all runs whose configuration is known."""
    known = [run for run in runs if run.cfg is not None]
    return {
        key: next(iter(of_run.values()))
        for key, of_run in _values(known).items()
        if len(of_run) == len(known) and len(set(of_run.values())) == 1
    }


def ranges(numbers: list[int]) -> str:
    """Numbers as people write them: 0–3, 7, 9–11."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def _values(runs: list[Run]) -> dict[str, dict[int, str]]:
    """Each key's value as text, by id(run)."""
    values: dict[str, dict[int, str]] = {}
    for run in runs:
        facts = flat({name: run.result[name] for name in FACTS if run.result.get(name) is not None})
        for key, value in (*run.keys.items(), *facts.items()):
            values.setdefault(key, {})[id(run)] = text(value)
    return values


def _choices(holders: dict[str, list[Run]], group: str) -> dict[str, str] | None:
    """Who has which value, by the choice of its group; None when the choice does not decide it."""
    chosen = {value: {value_of(run, group): None for run in members} for value, members in holders.items()}
    if sum(map(len, chosen.values())) > len({choice for choices in chosen.values() for choice in choices}):
        return None
    return {value: ", ".join(choices) for value, choices in chosen.items()}
