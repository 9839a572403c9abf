"""What one GPU can show of polyshard: checks in processes of their own, and a report.

``registry`` lists the checks, ``runner`` runs them, ``child`` is the process that one runs in,
``report`` writes what was found. Every other module is a check or what several of them share.
"""
