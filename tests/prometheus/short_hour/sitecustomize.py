"""Makes the hour of a job's goodput 20 s, in all processes of a test that has this folder in PYTHONPATH."""

from midstep.controller import metrics, notifications, time_account

SHORT_S = 20.0

time_account.BUCKET_S = 2.0
time_account.WINDOWS_S = (SHORT_S, *time_account.WINDOWS_S[1:])
metrics._WINDOWS[round(SHORT_S)] = "hour"
notifications.HOUR_S = SHORT_S
