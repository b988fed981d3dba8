#!/bin/sh
# Keeps the server running in the foreground, for containers and systemd: kinfed flower up starts it in the background.
set -eu
kinfed flower up --keys "$KINFED_KEYS" --host "${KINFED_HOST:-0.0.0.0}" --port "${KINFED_PORT:-8000}"
trap 'kinfed flower down; exit 0' TERM INT
while kinfed flower status --json | grep -q '"running": true'; do
  sleep 10 &
  wait $!
done
echo "the SuperLink has ended; see superlink.log" >&2
exit 1
