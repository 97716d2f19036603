<#
.SYNOPSIS
Removes everything that install.ps1 created: the service, the environment, the node's data and its key, the entry on PATH, and what
`echo-node --install-completion` wrote.

.EXAMPLE
powershell -ExecutionPolicy Bypass -File installers\windows\uninstall.ps1 -KeepIdentity
#>
[CmdletBinding()]
param(
    # Leave the node's key where it is, for a later install.
    [switch] $KeepIdentity
)

Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
. (Join-Path $PSScriptRoot 'settings.ps1')

# Removes the lines that `echo-node --install-completion` adds to a PowerShell profile. Other lines may have any
# encoding: each byte is read as one character, and stays unchanged.
function Remove-Completion([string] $File) {
    if (-not (Test-Path -LiteralPath $File)) { return }
    $bytes = [Text.Encoding]::GetEncoding(28591)
    $text = $bytes.GetString([IO.File]::ReadAllBytes($File))
    $pattern = '(?s)Import-Module PSReadLine\r?\nSet-PSReadLineKeyHandler -Chord Tab -Function MenuComplete\r?\n(?:(?!Register-ArgumentCompleter|Import-Module).)*Register-ArgumentCompleter -Native -CommandName echo-node -ScriptBlock \$scriptblock\r?\n?'
    $left = [regex]::Replace($text, $pattern, '')
    if ($left -eq $text) { return }
    if ($left.Trim()) { [IO.File]::WriteAllBytes($File, $bytes.GetBytes($left)) } else { Remove-Item -LiteralPath $File }
}

$data = Join-Path $env:LOCALAPPDATA 'echo-node'

if (Test-Path -LiteralPath $EchoNode) {
    & $EchoNode service uninstall
    if ($LASTEXITCODE -ne 0) { Write-Warning 'The service could not be stopped.' }
    if (Test-Path -LiteralPath (Join-Path $data 'control.json')) {
        & $EchoNode leave --force
        if ($LASTEXITCODE -ne 0) { Write-Warning 'The node could not be stopped.' }
    }
}

foreach ($shell in 'WindowsPowerShell', 'PowerShell') {
    Remove-Completion (Join-Path ([Environment]::GetFolderPath('MyDocuments')) "$shell\Microsoft.PowerShell_profile.ps1")
}

Set-UserPath @(Get-UserPath | Where-Object { $_ -ne $BinDir })

if (Test-Path -LiteralPath $data) {
    if ($KeepIdentity) {
        Get-ChildItem -LiteralPath $data -Force | Where-Object Name -ne 'identity.key' | Remove-Item -Recurse -Force
        Write-Host "Kept the node's key: $data\identity.key"
    }
    else { Remove-Item -LiteralPath $data -Recurse -Force }
}
if ($env:ECHO_NODE_HOME) { Write-Host "Not removed: $env:ECHO_NODE_HOME, the directory in ECHO_NODE_HOME" }
if (Test-Path -LiteralPath $Environment) { [IO.Directory]::Delete($Environment) } # The junction, before its target.
if (Test-Path -LiteralPath $HomeDir) { Remove-Item -LiteralPath $HomeDir -Recurse -Force }
Write-Host 'Removed echo-node.'
