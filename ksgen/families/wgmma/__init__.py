"""Hopper's family: tensor maps, mbarriers, wgmma."""
