"""python -m tests.foreign FOLDER: public CUDA kernels, each repository a folder of its name in FOLDER, against float64.

The exit status is 0 if all cases of the repositories that are there come out as they say.
"""

import sys
from pathlib import Path

from tests.foreign import Case, ForeignError, Verdict, judge
from tests.foreign.cases import CASES


def line(verdict: Verdict) -> str:
    case = verdict.case
    head = f"{case.repository:<14} {case.name:<32}"
    if verdict.complaints:
        return "\n    ".join([f"{head} NOT AS EXPECTED", *verdict.complaints])
    seen = f"refused unchanged {verdict.refusals}, damages seen {verdict.damages}"
    return f"{head} error {verdict.error:.1e} of at most {case.tolerance:.0e}; {seen}"


def judged(case: Case, folder: Path) -> Verdict:
    try:
        return judge(case, folder)
    except (ForeignError, OSError) as unfit:
        return Verdict(case, complaints=[str(unfit)])


def main(folder: str) -> int:
    known = sorted(set().union(*(case.repositories for case in CASES)))
    missing = [name for name in known if not Path(folder, name).is_dir()]
    for name in missing:
        print(f"{name:<14} not in {folder}")
    if len(missing) == len(known):
        print(f"{folder} has none of {', '.join(known)}: clone them there")
        return 1
    wrong = 0
    for case in CASES:
        if case.repositories.isdisjoint(missing):
            verdict = judged(case, Path(folder))
            print(line(verdict), flush=True)
            wrong += bool(verdict.complaints)
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
