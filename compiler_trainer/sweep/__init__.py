"""Multiruns: each point runs once and leaves a row (`point`, `row`); rows become a table and a page of plots."""
