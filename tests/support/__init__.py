"""What tests share: cases, masks written down a second time, the float64 truth, and the comparison."""
