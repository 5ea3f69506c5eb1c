# timeout: 300
# smp: 2
# The forks of stock Linux once more where the threads of a VMM and its copies run at the same time.
. "$JOB/jobs/30-linux-forks.sh"
