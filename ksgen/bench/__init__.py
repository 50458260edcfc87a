"""The paper's measurements on this machine: measuring, keeping the results, and reporting them.

    command -> runner -> contenders, clock -> log -> rows -> comparison -> report

Only the command line imports this package.
"""
