"""The SIMT family: plain multiply-adds of one factor, or of all factors of a layer."""
