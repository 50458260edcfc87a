"""The paper's measurements, repeated on this machine: measuring, storing and reporting.

    command -> runner -> contenders, timing -> log -> rows -> comparison -> report

Only the command line imports this package.
"""
