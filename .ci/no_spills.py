"""Fails where `ksgen build --json` reports a spill, or no registers at all."""

import json
import sys
from pathlib import Path

rows = json.loads(Path(sys.argv[1]).read_text())
bad = [row for row in rows if row["spill_bytes"] != 0 or not row["registers"]]
for row in bad:
    print(f"{row['entry']} for {row['target']}: {row['registers']} registers, {row['spill_bytes']} bytes spilled")
print(f"{len(rows)} binaries, at most {max(row['registers'] for row in rows)} registers, {len(bad)} with spills")
sys.exit(bool(bad) or not rows)
