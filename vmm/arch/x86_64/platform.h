/*
 * platform: port numbers that the VMM answers and that the firmware tables name.
 */
#pragma once

#define X86_I8042_BASE 0x60u
#define X86_I8042_COMMAND 0x64u
#define X86_PM1A_CONTROL 0x604u
#define X86_PM1_SLP_EN (1u << 13)
#define X86_PVPANIC 0x505u
#define X86_PVPANIC_PANICKED 1u
