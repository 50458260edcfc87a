"""The paper's measurements. No room above imports this one."""
