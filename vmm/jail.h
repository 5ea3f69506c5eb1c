/*
 * jail: what tine-vmm gives up before the first guest instruction.
 */
#pragma once

struct err;

/*
 * no_new_privs, all capabilities dropped, and the system call filter (jail_table.h). Inherited
 * descriptors are closed before by jail_close_inherited. A call outside the filter ends the process
 * by SIGSYS after a line that names it. Threads made later inherit all of it; so do fork children.
 */
int jail_enter(struct err *e);

/* Closes every descriptor above 2 except `keep` (-1: none). First thing in main. */
void jail_close_inherited(int keep);
