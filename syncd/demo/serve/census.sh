#!/bin/sh
# A stage in plain sh: counts what the payload holds, writes progress as it goes, and reports.
set -eu

progress() { # step total message
    printf '{"step": %s, "total": %s, "unit": "file", "message": "%s"}' "$1" "$2" "$3" \
        > "$SYNCD_PROGRESS_FILE.new"
    mv "$SYNCD_PROGRESS_FILE.new" "$SYNCD_PROGRESS_FILE"
}

total=$(find "$SYNCD_PAYLOAD" -type f | wc -l)
step=0
bytes=0
for file in $(find "$SYNCD_PAYLOAD" -type f | sort); do
    size=$(wc -c < "$file")
    step=$((step + 1))
    bytes=$((bytes + size))
    printf '%10d  %s\n' "$size" "${file#"$SYNCD_PAYLOAD"/}"
    progress "$step" "$total" "${file##*/}"
done

printf '%s files, %s bytes\n' "$total" "$bytes" > "$SYNCD_ARTIFACT_DIR/census.txt"
printf '{"run_id": "%s", "stage": "%s", "metrics": {"files": %s, "bytes": %s}}' \
    "$SYNCD_RUN_ID" "$SYNCD_STAGE" "$total" "$bytes" > "$SYNCD_RESULT_FILE"
